"""softsieve inside other libraries, each a module of its own: Hugging Face, Lightning, torch.distributed."""
