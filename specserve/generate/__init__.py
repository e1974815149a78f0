"""The command ``specserve generate``: continues texts or chats, and shows draft statistics."""
