/* The program in front of a process that forks pythons (warm_python.py): it hands over what it was started with, passes
   signals on, and ends as the fork ends. In C, since a python that does nothing takes 20 ms of processor time.

   It sends a line with the length of what follows, with descriptors beside it; then words that each end in a zero: the
   number of arguments, these, the folder, the signals that are ignored, the descriptors' numbers, the limits, and
   the environment. */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static const int PASSED_ON[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
#define COUNT(array) (sizeof(array) / sizeof *(array))
#define MOST_FILES 250 /* as in warm_agents.py; the kernel takes 253 at a time */

static int connection;

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static void pass_on(int number)
{
    char byte = number;
    int before = errno;
    if (write(connection, &byte, 1) < 0) {} /* it has ended, and we are about to read so */
    errno = before;
}

#ifdef PYTHON /* on hosts: what is no agent and no program of kit's is the real python's */
static const char *const SPACES[] = {"net", "uts", "ipc", "mnt", "pid"};
static const char *const MODULES[] = {
    "nodekit.deploy.agent", "nodekit.training.apply", "nodekit.training.pace", "nodekit.slurm.submission.submit"};

static const char *server_of(int argc, char **argv)
{
    if (argc > 2 && !strcmp(argv[1], "-m"))
        for (size_t each = 0; each < COUNT(MODULES); each++)
            if (!strcmp(argv[2], MODULES[each]))
                return AGENTS;
    if (argc > 2 && !strcmp(argv[1], "-u") && !strcmp(argv[2], "-"))
        return AGENTS; /* a program of kit's that imports torch */
    return argc == 3 && !strcmp(argv[1], "-c") && !strcmp(argv[2], BOOT) ? PROGRAMS : NULL;
}

/* All that are open; then those of the namespaces, which have no number to be found under. */
static int find_files(int *files, int *opened)
{
    int found = 0;
    DIR *folder = opendir("/proc/self/fd");
    if (!folder)
        fail("/proc/self/fd");
    for (struct dirent *each; (each = readdir(folder));)
        if (each->d_name[0] != '.' && atoi(each->d_name) != dirfd(folder)) {
            if (found == MOST_FILES - (int)COUNT(SPACES)) {
                errno = EMFILE;
                fail("too many open files to hand over");
            }
            files[found++] = atoi(each->d_name);
        }
    closedir(folder);
    *opened = found;
    for (size_t each = 0; each < COUNT(SPACES); each++) {
        char path[40];
        snprintf(path, sizeof path, "/proc/self/ns/%s", SPACES[each]);
        if ((files[found++] = open(path, O_RDONLY | O_CLOEXEC)) < 0)
            fail(path);
    }
    return found;
}
#else
static int find_files(int *files, int *opened)
{
    for (int each = 0; each < 3; each++)
        files[each] = each;
    return *opened = 3;
}
#endif

static void word(FILE *text, const char *word)
{
    fwrite(word, strlen(word) + 1, 1, text);
}

int main(int argc, char **argv, char **environment)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
#ifdef PYTHON
    const char *name = server_of(argc, argv);
    if (!name) {
        execv(PYTHON, argv); /* by our name: it is what the host's kit starts its agent by */
        fail(PYTHON);
    }
    strncpy(address.sun_path + 1, name, sizeof address.sun_path - 2); /* without a path: each network has its own */
    socklen_t size = offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name);
#else
    strncpy(address.sun_path, ADDRESS, sizeof address.sun_path - 1);
    socklen_t size = sizeof address;
#endif
    sigset_t passed;
    sigemptyset(&passed);
    for (size_t each = 0; each < COUNT(PASSED_ON); each++)
        sigaddset(&passed, PASSED_ON[each]);
    sigprocmask(SIG_BLOCK, &passed, NULL); /* until they can be passed on */

    int files[MOST_FILES], opened, found = find_files(files, &opened);
    connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(connection, (struct sockaddr *)&address, size) != 0)
        fail("connect");

    char *data, folder[4096];
    size_t length;
    FILE *text = open_memstream(&data, &length);
    fprintf(text, "%d%c", argc - 1, 0);
    for (char **each = argv + 1; *each; each++)
        word(text, *each);
    if (!getcwd(folder, sizeof folder))
        fail("the folder");
    word(text, folder);
    for (int each = 1; each < NSIG; each++) {
        struct sigaction now;
        if (sigaction(each, NULL, &now) == 0 && now.sa_handler == SIG_IGN) {
            fprintf(text, "%d ", each);
            sigdelset(&passed, each);
        }
    }
    fputc(0, text);
    for (int each = 0; each < opened; each++)
        fprintf(text, "%d ", files[each]);
    fputc(0, text);
    for (int each = 0; each < RLIM_NLIMITS; each++) {
        struct rlimit limit;
        getrlimit(each, &limit);
        fprintf(text, "%lld %lld ", (long long)limit.rlim_cur, (long long)limit.rlim_max);
    }
    fputc(0, text);
    for (char **each = environment; *each; each++)
        word(text, *each);
    fclose(text);

    char line[12], beside[CMSG_SPACE(sizeof files)] = {0};
    snprintf(line, sizeof line, "%10zu\n", length);
    struct iovec one = {line, sizeof line - 1};
    struct msghdr message = {.msg_iov = &one, .msg_iovlen = 1, .msg_control = beside};
    message.msg_controllen = CMSG_SPACE(found * sizeof *files);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(found * sizeof *files);
    memcpy(CMSG_DATA(header), files, found * sizeof *files);
    if (sendmsg(connection, &message, MSG_NOSIGNAL) < 0)
        fail("send");
    for (size_t sent = 0; sent < length;) {
        ssize_t now = send(connection, data + sent, length - sent, MSG_NOSIGNAL);
        if (now < 0)
            fail("send");
        sent += now;
    }
#ifdef PYTHON
    for (int each = 0; each < found; each++)
        if (files[each] == 0 || files[each] > 2)
            close(files[each]); /* sockets that the agent is handed: nobody else is to keep them */
#endif

    struct sigaction action = {.sa_handler = pass_on, .sa_flags = SA_RESTART};
    for (size_t each = 0; each < COUNT(PASSED_ON); each++)
        if (sigismember(&passed, PASSED_ON[each]))
            sigaction(PASSED_ON[each], &action, NULL);
    for (size_t each = 0; each < COUNT(PASSED_ON); each++)
        sigaddset(&passed, PASSED_ON[each]);
    sigprocmask(SIG_UNBLOCK, &passed, NULL);

    char said[20] = {0};
    for (size_t got = 0; got + 1 < sizeof said && !memchr(said, '\n', got);) {
        ssize_t more = read(connection, said + got, sizeof said - 1 - got);
        if (more <= 0)
            break;
        got += more;
    }
    int status = *said ? atoi(said) : -SIGKILL;
    if (status >= 0)
        _exit(status);
    signal(-status, SIG_DFL);
    sigemptyset(&passed);
    sigaddset(&passed, -status);
    sigprocmask(SIG_UNBLOCK, &passed, NULL);
    kill(getpid(), -status);
    _exit(1);
}
