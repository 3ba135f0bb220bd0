"""What runs an exported artifact: decoding, tokenising and ONNX encoders; needs no torch.

formats.py colours.py images.py   bytes to RGB pixels, or a reason why not
preprocess.py                     pixels to an image tower's input
texts.py                          text to its canonical form and to token ids
threads.py                        how many threads this process may use
providers.py                      the one choice of device; opens onnxruntime sessions
stages.py onnx_encoder.py         one stage; a tower that answers early and runs ahead
onnx_reranker.py                  the cross-modal encoder: states of texts and pictures, pairs
progress.py stopping.py           how far long work is; SIGTERM as an orderly end of it
loading.py                        `load_encoders`, `load_reranker`: verified, warm, ready to serve
"""
