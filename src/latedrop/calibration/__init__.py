"""From measured variances to calibrated predictions.

It may import every room below `prediction`: data, metrics, network, dropout, propagation, terms and streams.
"""
