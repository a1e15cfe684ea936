"""Images and labels: datasets, their preparation, transforms and loaders. Imports no other stage."""
