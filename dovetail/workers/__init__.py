"""What each role does in its process. Roles hold a backend; they never inherit one."""
