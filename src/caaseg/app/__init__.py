"""The web app of `caaseg app`: photos, their predicted classes, and the attention of a selected pixel.

`server.py` has the requests, `photos.py` the stored photos, `predictions.py` what the models say about them,
`downloads.py` the files to save, `protection.py` the refusal of foreign requests, and `page/` the page itself.
"""
