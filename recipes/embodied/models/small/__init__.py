"""Small policies: multilayer perceptrons and convolutional networks."""
