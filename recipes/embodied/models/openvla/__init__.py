"""OpenVLA and OpenVLA-OFT: DINOv2 and SigLIP side by side, a projection, and a Llama that writes actions."""
