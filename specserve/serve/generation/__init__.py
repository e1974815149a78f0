"""The generation API of Text Generation Inference and MindIE."""
