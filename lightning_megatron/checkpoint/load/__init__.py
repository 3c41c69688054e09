"""Loading: tensors out of files into the chunks that a rank holds, without unpickling."""
