"""Train any sequence of layers in a pipeline (`Pipeline`): an image classifier, an encoder and a decoder, ..."""
