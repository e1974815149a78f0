"""The command ``specserve generate``: texts continued, and a chat, beside what speculation did."""
