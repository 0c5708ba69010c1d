"""Reference models of sparkinfer: corpus, tokenizer, training, drafters, and their evaluation."""
