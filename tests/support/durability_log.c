/* Write each successful call that changes or syncs a file as a line to the file $EBBFLOW_TEST_CALLS (LD_PRELOAD). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void record(const char *format, ...) {
    const char *path = getenv("EBBFLOW_TEST_CALLS");
    char line[9000];
    va_list values;
    if (path == NULL)
        return;
    va_start(values, format);
    int length = vsnprintf(line, sizeof line, format, values);
    va_end(values);
    int log = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (log < 0 || syscall(SYS_write, log, line, length) != length)
        abort();
    syscall(SYS_close, log);
}

static void record_descriptor(const char *name, int descriptor) {
    char link[64], path[4097];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return;
    path[length] = 0;
    record("%s\t%s\n", name, path);
}

ssize_t write(int descriptor, const void *data, size_t size) {
    ssize_t written = NEXT(write)(descriptor, data, size);
    if (written >= 0 && descriptor == 1)
        record("answer\t%.*s\n", (int)strcspn(data, "\n"), (const char *)data);
    else if (written >= 0)
        record_descriptor("write", descriptor);
    return written;
}

ssize_t pwrite(int descriptor, const void *data, size_t size, off_t start) {
    ssize_t written = NEXT(pwrite)(descriptor, data, size, start);
    if (written >= 0)
        record_descriptor("write", descriptor);
    return written;
}

ssize_t pwrite64(int descriptor, const void *data, size_t size, off64_t start) {
    ssize_t written = NEXT(pwrite64)(descriptor, data, size, start);
    if (written >= 0)
        record_descriptor("write", descriptor);
    return written;
}

int fsync(int descriptor) {
    int result = NEXT(fsync)(descriptor);
    if (result == 0)
        record_descriptor("fsync", descriptor);
    return result;
}

int rename(const char *path, const char *new_path) {
    int result = NEXT(rename)(path, new_path);
    if (result == 0)
        record("rename\t%s\t%s\n", path, new_path);
    return result;
}

int link(const char *path, const char *new_path) {
    int result = NEXT(link)(path, new_path);
    if (result == 0)
        record("link\t%s\t%s\n", path, new_path);
    return result;
}

int mkdir(const char *path, mode_t mode) {
    int result = NEXT(mkdir)(path, mode);
    if (result == 0)
        record("mkdir\t%s\n", path);
    return result;
}

int unlink(const char *path) {
    int result = NEXT(unlink)(path);
    if (result == 0)
        record("unlink\t%s\n", path);
    return result;
}
