"""What a model costs on paper: parameters, bytes, FLOPs, seconds at best. Nothing here needs torch."""
