"""Chat demo: eight chats stream at once while workers are killed, stopped and scaled.
Every token is compared with what the undisturbed model would choose."""
