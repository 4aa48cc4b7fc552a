"""One HTML page about one output of a prediction, or about two beside each other."""
