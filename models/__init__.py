"""What turns a picture or a sentence into vectors: encoders that answer early.

The contracts (`levels`, `encoder`, `reranker`, `artifact`, `errors`) and `runtime` need neither
torch nor a GPU; `network`, `objectives` and `training` are torch and are never imported to serve.
"""
