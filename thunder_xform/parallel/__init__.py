"""Process groups and meshes, collective operators, gradient synchronization, agreement between ranks."""
