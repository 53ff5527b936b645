"""Small worlds that tests share: tiny models, corpora, stores, servers, and how to start them."""
