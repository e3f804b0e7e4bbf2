"""Policies built here: multilayer perceptrons and small convolutional networks."""
