"""What runs beside the KV tensors: copy engines, the strict reader, the layout they share. Knows no engine."""
