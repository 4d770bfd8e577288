"""Client and AsyncClient."""
