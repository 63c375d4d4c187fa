"""AS-Softmax inside other people's training loops: Hugging Face Trainer and Lightning, each a module of its own."""
