/* Comes before libc (LD_PRELOAD) in every process of a job, and makes calls slow or fail while a file says so.
 *
 * EBBFLOW_SHIM_RULES is a folder; its file `write`, `fsync` or `connect`, where there is one, holds two numbers: the
 * milliseconds that a call takes longer, and the errno that it then fails with, 0 for none. write (with pwrite and
 * writev) and fsync (with fdatasync) count only for files below EBBFLOW_SHIM_FILES, connect only for IPv4 and IPv6.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static int below_files(int fd) {
    const char *files = getenv("EBBFLOW_SHIM_FILES");
    char link[64], path[PATH_MAX];
    if (files == NULL) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return strncmp(path, files, strlen(files)) == 0;
}

/* The errno to fail with, 0 to go on. By system calls alone, so that it never meets itself. */
static int hurt(const char *name) {
    const char *rules = getenv("EBBFLOW_SHIM_RULES");
    char path[PATH_MAX], text[64];
    if (rules == NULL) return 0;
    snprintf(path, sizeof path, "%s/%s", rules, name);
    int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t length = syscall(SYS_read, fd, text, sizeof text - 1);
    syscall(SYS_close, fd);
    if (length <= 0) return 0;
    text[length] = 0;
    long milliseconds = 0;
    int number = 0;
    if (sscanf(text, "%ld %d", &milliseconds, &number) != 2) return 0;
    struct timespec left = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) continue;
    return number;
}

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))
#define FAIL_IF(condition, rule)                      \
    do {                                              \
        int saved = errno;                            \
        int number = (condition) ? hurt(rule) : 0;    \
        errno = number ? number : saved;              \
        if (number) return -1;                        \
    } while (0)

ssize_t write(int fd, const void *data, size_t size) {
    FAIL_IF(below_files(fd), "write");
    return REAL(write)(fd, data, size);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    FAIL_IF(below_files(fd), "write");
    return REAL(pwrite)(fd, data, size, at);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    FAIL_IF(below_files(fd), "write");
    return REAL(pwrite64)(fd, data, size, at);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    FAIL_IF(below_files(fd), "write");
    return REAL(writev)(fd, parts, count);
}

int fsync(int fd) {
    FAIL_IF(below_files(fd), "fsync");
    return REAL(fsync)(fd);
}

int fdatasync(int fd) {
    FAIL_IF(below_files(fd), "fsync");
    return REAL(fdatasync)(fd);
}

int connect(int fd, const struct sockaddr *address, socklen_t size) {
    FAIL_IF(address->sa_family == AF_INET || address->sa_family == AF_INET6, "connect");
    return REAL(connect)(fd, address, size);
}
