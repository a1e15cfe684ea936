"""The web app of `caaseg app`: photos, their predicted classes, and the attention of a selected pixel.

`server.py` answers requests, `photos.py` stores photos, `predictions.py` computes predictions and attention,
`downloads.py` writes the files to save, `protection.py` refuses requests of other web sites, and `page/` is the page.
"""
