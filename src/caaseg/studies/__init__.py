"""Whole undertakings, from what a user gives to the folder that they keep."""
