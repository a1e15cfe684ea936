"""Download, unpack, convert and check datasets."""
