"""Routes of embeddings, scores, classification and TEI."""
