package reshuffle

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

const (
	userA = 60001
	userB = 60002
)

// runAs makes or finds an output as another user, and returns what the run said.
func runAs(t *testing.T, user uint32, o Options) (string, error) {
	t.Helper()
	cmd := childCommand(t, childWork{Model: o.Model, Out: o.Out, Permutation: o.Permutation, Limit: o.Limit})
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
	said, err := cmd.CombinedOutput()
	return string(said), err
}

func mustRunAs(t *testing.T, user uint32, o Options) {
	t.Helper()
	if said, err := runAs(t, user, o); err != nil {
		t.Errorf("user %d: %v: %s", user, err, said)
	}
}

// newOpenShared is a directory of outputs in which every user may write.
func newOpenShared(t *testing.T, outputs int) *shared {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can become other users")
	}
	s := newShared(t, outputs)
	// Temporary directories are closed to others.
	err := errors.Join(os.Chmod(filepath.Dir(s.model), 0o755), os.Chmod(filepath.Dir(s.dir), 0o755), os.Chmod(s.dir, 0o777))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// An output is found by whoever runs, whatever the umask of the one that made it; its time of use is that of the last.
func TestAnotherUsersOutput(t *testing.T) {
	s := newOpenShared(t, 2)
	defer syscall.Umask(syscall.Umask(0o077))
	mustRunAs(t, userA, s.work[0])
	s.used(t, 0, time.Hour)
	mustRunAs(t, userB, s.work[0])
	if time.Since(lastUse(t, s.work[0].Out)) > time.Minute {
		t.Error("the use by another user did not count")
	}
	sameTensors(t, expected(s.tensors, s.work[0].Permutation), readAll(t, s.work[0].Out))
}

// Earlier versions made files that their user alone could write.
func TestClosedGuards(t *testing.T) {
	s := newOpenShared(t, 1)
	out := s.work[0].Out
	mustRunAs(t, userA, s.work[0])
	closed := func() {
		t.Helper()
		for _, path := range []string{hidden(out, usedSuffix), hidden(out, lockSuffix)} {
			writeFile(t, path, []byte("7"))
			if err := errors.Join(os.Chown(path, userA, userA), os.Chmod(path, 0o644)); err != nil {
				t.Fatal(err)
			}
		}
		s.used(t, 0, time.Hour)
	}
	closed()
	mustRunAs(t, userB, s.work[0])
	if time.Since(lastUse(t, out)) > time.Minute {
		t.Error("the use by another user did not count")
	}
	closed()
	hold, err := newHold(out)
	if err != nil {
		t.Fatal(err)
	}
	defer hold.Release()
	mustRunAs(t, userB, s.work[0])
	if free(t, out) || time.Since(lastUse(t, out)) < time.Minute {
		t.Error("the file of use was replaced although it was held")
	}
}

// What a run of another user has left is taken over where that user lets it.
func TestAnotherUsersWorkplace(t *testing.T) {
	s := newOpenShared(t, 1)
	j, err := newJob(t.Context(), s.work[0])
	if err != nil {
		t.Fatal(err)
	}
	j.close()
	workplace := workplaceOf(j.out, identity(j.identity, j.Permutation.Digest()))
	if err := errors.Join(os.Mkdir(workplace, 0o777), os.Chmod(workplace, 0o777), os.Chown(workplace, userA, userA)); err != nil {
		t.Fatal(err)
	}
	mustRunAs(t, userB, s.work[0])
	sameTensors(t, expected(s.tensors, s.work[0].Permutation), readAll(t, s.work[0].Out))
}

// A run makes room among its user's outputs; those of others count, and stay whole.
func TestLimitKeepsOutputsOfOthers(t *testing.T) {
	s := newOpenShared(t, 4)
	mustRunAs(t, userA, s.work[0])
	mustRunAs(t, userB, s.work[1])
	s.used(t, 0, 2*time.Hour)
	s.used(t, 1, time.Hour)
	said, err := runAs(t, userB, s.limited(2, 1))
	if err == nil || !strings.Contains(said, "out-0 (") || !strings.Contains(said, "of another user)") {
		t.Errorf("%v: %s", err, said)
	}
	mustRunAs(t, userB, s.limited(2, 2))
	if got := s.there(t); got != "0 2" {
		t.Errorf("%s are there, want 0 2", got)
	}
	// A lock that cannot even be looked at.
	path := hidden(s.work[0].Out, lockSuffix)
	writeFile(t, path, nil)
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	s.used(t, 2, time.Hour)
	mustRunAs(t, userB, s.limited(3, 2))
	if got := s.there(t); got != "0 3" {
		t.Errorf("%s are there, want 0 3", got)
	}
}
