"""Any layers in a pipeline (`Pipeline`): an image classifier, an encoder and a decoder, whatever is a sequence."""
