"""Client and AsyncClient, and the steps that both carry out."""
