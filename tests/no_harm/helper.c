/* Does to files what a program does that no rule of Python sees: helper HOW PATH [PATH]. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static int overwrite(const char *path) {
    int file = open(path, O_WRONLY | O_TRUNC);
    return file < 0 || write(file, "n", 1) != 1;
}

static int map(const char *path) {
    int file = open(path, O_RDWR);
    char *bytes = mmap(NULL, 1, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file < 0 || bytes == MAP_FAILED)
        return 1;
    bytes[0] = 'n';
    return msync(bytes, 1, MS_SYNC);
}

/* A daemon as they were always made: two forks, a session of its own, and a file that it writes again and again. */
static int daemonise(const char *path) {
    if (fork() > 0)
        return 0;
    setsid();
    if (fork() > 0)
        _exit(0);
    for (int second = 0; second < 600; second++) {
        int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
        if (file >= 0 && write(file, "n", 1) == 1)
            close(file);
        sleep(1);
    }
    return 0;
}

int main(int count, char **words) {
    const char *how = count > 1 ? words[1] : "", *path = count > 2 ? words[2] : "";
    if (!strcmp(how, "overwrite"))
        return overwrite(path);
    if (!strcmp(how, "unlink"))
        return unlink(path) != 0;
    if (!strcmp(how, "rename"))
        return count < 4 || rename(path, words[3]) != 0;
    if (!strcmp(how, "exchange"))
        return count < 4 || renameat2(AT_FDCWD, path, AT_FDCWD, words[3], RENAME_EXCHANGE) != 0;
    if (!strcmp(how, "map"))
        return map(path);
    if (!strcmp(how, "truncate"))
        return truncate(path, 1) != 0;
    if (!strcmp(how, "chmod"))
        return chmod(path, 0600) != 0;
    if (!strcmp(how, "link"))
        return count < 4 || link(path, words[3]) != 0;
    if (!strcmp(how, "rmdir"))
        return rmdir(path) != 0;
    if (!strcmp(how, "daemon"))
        return daemonise(path);
    fprintf(stderr, "helper: unknown: %s\n", how);
    return 2;
}
