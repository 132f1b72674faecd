"""Fork server: one process a host that has loaded torch, from which the ranks there are forked.

    choice         whether ranks are forked on this machine; if not, each is a process of its own
    client         the launcher's side: starts the fork servers, and asks them for ranks
    forked_rank    a rank, as the launcher holds it: what it needs of subprocess.Popen
    process        the fork server itself, and the first steps of a rank that it has forked

What ends when: standard input of the fork server and of each rank is a pipe of the launcher, so all
end with it. Ranks outlive a fork server that is killed; the launcher then starts others without it.
"""
