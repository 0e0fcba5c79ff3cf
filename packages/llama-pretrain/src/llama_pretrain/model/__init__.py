"""The model: configuration, layers, generation, and files in the Hugging Face layout."""
