"""How a decoder writes: sampling, generation, speculation, serving, several GPUs."""
