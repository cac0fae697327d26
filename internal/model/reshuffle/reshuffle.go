// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/model/reshuffle/filelock"
	"github.com/semmoe/operator/internal/model/reshuffle/progress"
)

// DefaultParallel is the default number of shards written concurrently. Four are enough to keep a disk busy.
const DefaultParallel = 4

// Options configures a run.
type Options struct {
	// Model is the directory of the checkpoint. It is only read.
	Model string
	// LayoutAs is the known model type whose layout the checkpoint has. It is empty if that is its own type.
	LayoutAs string
	// Permutation is the order of the experts.
	Permutation *Permutation
	// Out is the output directory. It must not exist, be empty, or be the output of a run with the same model and
	// permutation.
	Out string
	// Verify re-reads input and output and compares every byte.
	Verify bool
	// Parallel is the number of shards written concurrently. 0 means DefaultParallel.
	Parallel int
	// Limit is the maximum total size in bytes of all outputs in Out's parent directory. Unused outputs are removed to
	// make room for a new one. 0 means no limit: nothing is removed.
	Limit int64

	// grace is the time for which an output is kept after its last use. It is set by tests; 0 means useGrace.
	grace time.Duration
	// atStep is called between the steps. Tests use it to end the process at a step.
	atStep func(step string)
}

// Result describes the output of a run.
type Result struct {
	// Reused reports whether the output already existed. Resumed is the number of shards written by an earlier run.
	Reused  bool `json:"reused"`
	Resumed int  `json:"resumed_shards"`
	// Verified is always true: a run returns no result if the check of the output's names and of a sample of its bytes
	// fails. Compared reports whether every byte was compared.
	Verified          bool   `json:"verified"`
	Compared          bool   `json:"compared"`
	SourceDigest      string `json:"source_digest"`
	ModelDigest       string `json:"model_digest"`
	PermutationDigest string `json:"permutation_digest"`
	Layers            int    `json:"layers"`
	Shards            int    `json:"shards"`
	// Bytes is the size of the shards' data. Seconds is the duration of the whole run.
	Bytes   int64   `json:"bytes"`
	Seconds float64 `json:"seconds"`
	// Method is the most expensive copy method that was used: reflink, copy_file_range or buffered.
	Method  string   `json:"method,omitempty"`
	LeftOut []string `json:"left_out,omitempty"`
}

// Run creates the output, or finds an existing one. Invalid input returns a *checkpoint.InvalidError. After any other
// error, or after the process was killed, another run resumes where this one ended.
func Run(ctx context.Context, o Options) (*Result, error) {
	result, lease, err := Acquire(ctx, o)
	if err != nil {
		return nil, err
	}
	lease.Release()
	return result, nil
}

// Acquire does the same as Run, and keeps the output from being removed until the lease is released or the process
// ends.
func Acquire(ctx context.Context, o Options) (*Result, *Lease, error) {
	start := time.Now()
	j, err := newJob(ctx, o)
	if err != nil {
		return nil, nil, err
	}
	defer j.close()
	if err := os.MkdirAll(filepath.Dir(j.out), directoryMode); err != nil {
		return nil, nil, j.outputPathError(err)
	}
	if j.lock, err = filelock.Wait(ctx, hidden(j.out, lockSuffix)); err != nil {
		return nil, nil, err
	}
	defer j.lock.Release()
	// The lease begins before the output exists, and the run's own lock ends later. The output is never unlocked in
	// between.
	lease, err := newLease(j.out)
	if err != nil {
		return nil, nil, err
	}
	result, err := j.run(ctx)
	if err == nil {
		err = lease.touch()
	}
	if err != nil {
		lease.abandon()
		return nil, nil, err
	}
	result.Seconds = time.Since(start).Seconds()
	return result, lease, nil
}

// job is the work of one run. All input has been validated.
type job struct {
	Options
	out      string // absolute
	source   *checkpoint.Checkpoint
	identity Source
	mapping  *mapping
	files    *sourceFiles
	copier   copier
	// lock is the lock of the output.
	lock filelock.Lock
}

func newJob(ctx context.Context, o Options) (*job, error) {
	j := &job{Options: o}
	if j.Parallel == 0 {
		j.Parallel = DefaultParallel
	}
	if j.Parallel < 1 {
		return nil, checkpoint.Invalidf("parallel: %d is invalid: it must be at least 1", j.Parallel)
	}
	if j.Limit < 0 {
		return nil, checkpoint.Invalidf("limit: %d bytes is invalid: it must be positive, or 0 for no limit", j.Limit)
	}
	if j.grace == 0 {
		j.grace = useGrace
	}
	if j.atStep == nil {
		j.atStep = func(string) {}
	}
	var err error
	if j.out, err = checkDisjoint(o.Model, o.Out); err != nil {
		return nil, err
	}
	if j.source, err = checkpoint.OpenAs(o.Model, o.LayoutAs); err != nil {
		return nil, err
	}
	if err := j.prepare(ctx); err != nil {
		j.close()
		return nil, err
	}
	return j, nil
}

// close closes the input and releases its headers. The job cannot read the input afterwards.
func (j *job) close() {
	if j.source != nil {
		j.source.Close()
	}
	j.source, j.mapping = nil, nil
}

func (j *job) prepare(ctx context.Context) (err error) {
	if j.mapping, err = newMapping(j.source, j.Permutation); err != nil {
		return err
	}
	if j.files, err = findFiles(ctx, os.DirFS(j.source.Dir), j.source, j.mapping); err != nil {
		return err
	}
	for _, shard := range j.source.Shards {
		j.copier.total += shard.DataBytes()
	}
	j.identity, err = identify(j.source)
	return err
}

// checkDisjoint requires that neither directory contains the other, and returns the absolute path of the output.
func checkDisjoint(model, out string) (string, error) {
	absolute, err := filepath.Abs(out)
	if err != nil {
		return "", err
	}
	from, err := filepath.Abs(model)
	if err != nil {
		return "", err
	}
	from, to := resolve(from), resolve(absolute)
	if within(from, to) || within(to, from) {
		return "", checkpoint.Invalidf("output %s and model %s overlap: use an output directory outside the model directory", out, model)
	}
	return absolute, nil
}

// resolve resolves the symbolic links of the longest prefix of a path that exists.
func resolve(path string) string {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		return real
	}
	if parent := filepath.Dir(path); parent != path {
		return filepath.Join(resolve(parent), filepath.Base(path))
	}
	return path
}

func within(dir, path string) bool {
	relative, err := filepath.Rel(dir, path)
	return err == nil && relative != ".." && !strings.HasPrefix(relative, "../")
}

// hidden returns the path of a hidden file or directory next to an output. Readers of outputs ignore hidden names.
func hidden(out, suffix string) string {
	return filepath.Join(filepath.Dir(out), "."+filepath.Base(out)+suffix)
}

func (j *job) run(ctx context.Context) (*Result, error) {
	// This run may have waited for hours for another run, and the files of the model may have changed since.
	var err error
	if j.files, err = findFiles(ctx, os.DirFS(j.source.Dir), j.source, j.mapping); err != nil {
		return nil, err
	}
	result := &Result{
		SourceDigest: j.identity.ModelDigest, PermutationDigest: j.Permutation.Digest(), Layers: len(j.mapping.toOld),
		Shards: len(j.source.Shards), Bytes: j.copier.total, LeftOut: j.files.leftOut, Verified: true, Compared: j.Verify,
	}
	existing, err := j.existing(ctx)
	if err != nil {
		return nil, err
	}
	if existing != nil {
		result.Reused, result.ModelDigest = true, existing.ModelDigest
		return result, errors.Join(j.reverify(ctx, existing), j.removeOthers(""))
	}
	staging := stagingDir(j.out, identity(j.identity, result.PermutationDigest))
	if err := j.removeOthers(staging); err != nil {
		return nil, err
	}
	if err := j.reserveSpace(ctx, staging); err != nil {
		return nil, err
	}
	manifest, resumed, err := j.build(ctx, staging)
	if err != nil {
		return nil, err
	}
	if err := j.finish(staging, manifest); err != nil {
		return nil, err
	}
	result.Resumed, result.ModelDigest = resumed, manifest.ModelDigest
	if resumed < result.Shards {
		result.Method = Method(j.copier.costliest.Load()).String()
	}
	return result, nil
}

// existing returns the manifest of an existing output of the same work, after updating the output. It returns nil if
// there is no output yet.
func (j *job) existing(ctx context.Context) (*Manifest, error) {
	entries, err := os.ReadDir(j.out)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(entries) == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, j.outputPathError(err)
	}
	m, found, err := readManifest(j.out)
	if err != nil {
		return nil, err
	}
	if !found {
		return nil, checkpoint.Invalidf("%s is not empty and was not made by reshuffle: use another directory", j.out)
	}
	if why := m.mismatch(j.identity, j.Permutation); why != "" {
		return nil, checkpoint.Invalidf("%s holds another checkpoint: %s; remove it or use another directory", j.out, why)
	}
	if err := j.refresh(ctx, m); err != nil {
		return nil, err
	}
	return m, m.check(j.out)
}

// outputPathError turns an output path that cannot be a directory into an InvalidError. Other failures are returned
// unchanged, because another run may succeed.
func (j *job) outputPathError(err error) error {
	if errors.Is(err, unix.ENOTDIR) {
		return checkpoint.Invalidf("output %s is a file, or is below a file (%v): use a directory", j.Out, err)
	}
	return err
}

// reverify compares an existing output in full, if requested, and adds the shard hashes to its manifest.
func (j *job) reverify(ctx context.Context, m *Manifest) error {
	if !j.Verify {
		return nil
	}
	sums, err := (&verifier{j.source, j.mapping, true}).verify(ctx, j.out, j.Parallel)
	if err != nil {
		return err
	}
	for name, sum := range sums {
		shard := m.Shards[name]
		shard.SHA256 = sum
		m.Shards[name] = shard
	}
	return m.save(j.out)
}

// stagingDir returns the directory in which this user writes an output. If another user has left a staging directory
// that this user cannot write, the result is a directory specific to this user: the other user may never return.
func stagingDir(out, identity string) string {
	staging := hidden(out, fmt.Sprintf(".%.16s.partial", identity))
	if closedDirectory(staging) {
		return hidden(out, fmt.Sprintf(".%.16s.partial", digest([]byte(fmt.Sprintf("%s\nuser %d\n", identity, os.Geteuid())))))
	}
	return staging
}

// closedDirectory reports whether this user may not write to a directory, because it belongs to another user.
func closedDirectory(path string) bool {
	return errors.Is(unix.Access(path, unix.W_OK), fs.ErrPermission)
}

// stagingName matches the base name of a staging directory. The first group is the base name of its output.
var stagingName = regexp.MustCompile(`^\.(.+)\.[0-9a-f]{16}\.partial$`)

// stagingDirs lists the staging directories of an output that earlier runs have left.
func stagingDirs(out string) ([]string, error) {
	entries, err := os.ReadDir(filepath.Dir(out))
	if err != nil {
		return nil, err
	}
	var paths []string
	for _, entry := range entries {
		if match := stagingName.FindStringSubmatch(entry.Name()); match != nil && match[1] == filepath.Base(out) && entry.IsDir() {
			paths = append(paths, filepath.Join(filepath.Dir(out), entry.Name()))
		}
	}
	return paths, nil
}

// removeOthers removes the staging directories that runs with another model or permutation have left for the same
// output, except those of other users. This run has the output's lock, so no other run is active.
func (j *job) removeOthers(staging string) error {
	left, err := stagingDirs(j.out)
	if err != nil {
		return err
	}
	for _, path := range left {
		if path == staging {
			continue
		}
		if err := os.RemoveAll(path); err != nil && !errors.Is(err, fs.ErrPermission) {
			return err
		}
	}
	return nil
}

// build fills the staging directory with the whole output.
func (j *job) build(ctx context.Context, staging string) (*Manifest, int, error) {
	if err := createStagingDir(staging); err != nil {
		return nil, 0, err
	}
	if err := j.prune(staging); err != nil {
		return nil, 0, err
	}
	resumed, err := j.writeShards(ctx, staging)
	if err != nil {
		return nil, 0, err
	}
	if err := j.writeFiles(ctx, staging); err != nil {
		return nil, 0, err
	}
	manifest, err := j.verifyOutput(ctx, staging)
	return manifest, resumed, err
}

// createStagingDir creates a staging directory that other users may read, regardless of the umask, because their runs
// count its size. An existing path must be a directory. Other users may write to the parent directory, and a symbolic
// link of theirs would point this run at a directory that it then empties.
func createStagingDir(path string) error {
	switch err := os.Mkdir(path, directoryMode); {
	case err == nil:
		return os.Chmod(path, directoryMode)
	case !errors.Is(err, fs.ErrExist):
		return err
	}
	if info, err := os.Lstat(path); err != nil || info.IsDir() {
		return err
	}
	return fmt.Errorf("%s is not a directory: remove it", path)
}

// finish completes the manifest of a filled staging directory and renames the directory to the output.
func (j *job) finish(staging string, manifest *Manifest) error {
	j.close() // releases the memory of the input's headers before the output's are read
	report, err := checkpoint.InspectAs(staging, j.LayoutAs)
	if err != nil {
		return fmt.Errorf("failed to inspect the output: %w", err)
	}
	manifest.ModelDigest = report.ModelDigest
	j.atStep("verified")
	if err := manifest.write(staging); err != nil {
		return err
	}
	j.atStep("manifest")
	if err := syncTree(staging); err != nil {
		return err
	}
	return j.publish(staging)
}

// prune removes the files of an earlier run that this run does not write.
func (j *job) prune(staging string) error {
	keep := map[string]bool{}
	for _, shard := range j.source.Shards {
		keep[shard.Name()] = true
	}
	for _, name := range j.files.names() {
		keep[name] = true
	}
	return fs.WalkDir(os.DirFS(staging), ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || keep[name] {
			return err
		}
		return os.Remove(filepath.Join(staging, name))
	})
}

// writeShards copies the missing shards, several concurrently, and returns the number of shards that were already
// there.
func (j *job) writeShards(ctx context.Context, staging string) (resumed int, err error) {
	missing, err := j.missing(staging)
	if err != nil {
		return 0, err
	}
	defer progress.Log(ctx, "Reshuffling", j.copier.total, &j.copier.done)()
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(j.Parallel)
	for _, shard := range missing {
		plan, err := planShard(shard, j.mapping)
		if err != nil {
			return 0, errors.Join(err, group.Wait())
		}
		group.Go(func() error {
			err := plan.write(ctx, &j.copier, filepath.Join(staging, shard.Name()))
			j.atStep("shard")
			return err
		})
	}
	return len(j.source.Shards) - len(missing), group.Wait()
}

// missing lists the shards that have not been written yet. The finished shards are counted first, because the first
// copy checks the free space for the remaining bytes. The plans are discarded: their headers take memory.
func (j *job) missing(staging string) (missing []*checkpoint.File, err error) {
	for _, shard := range j.source.Shards {
		plan, err := planShard(shard, j.mapping)
		if err != nil {
			return nil, err
		}
		written, err := plan.written(filepath.Join(staging, shard.Name()))
		if err != nil {
			return nil, err
		}
		if written {
			j.copier.done.Add(shard.DataBytes())
		} else {
			missing = append(missing, shard)
		}
	}
	return missing, nil
}

// writeFiles writes all files other than shards and the manifest.
func (j *job) writeFiles(ctx context.Context, staging string) error {
	for _, name := range j.files.copied {
		if err := j.writeFile(ctx, staging, name); err != nil {
			return err
		}
		j.atStep("file")
	}
	for name := range j.files.rewritten {
		if err := j.writeFile(ctx, staging, name); err != nil {
			return err
		}
		j.atStep("configuration")
	}
	if j.source.IndexName == "" {
		return nil
	}
	defer j.atStep("index")
	return writeAtomically(filepath.Join(staging, j.source.IndexName), func(file *os.File) error { return j.writeIndex(file) })
}

// writeFile writes a file that is copied or rewritten.
func (j *job) writeFile(ctx context.Context, dir, name string) error {
	if text, ok := j.files.rewritten[name]; ok {
		return writeText(filepath.Join(dir, name), text)
	}
	return copyFile(ctx, &copier{}, j.source.Dir, name, filepath.Join(dir, name))
}

func writeText(path string, text []byte) error {
	return writeAtomically(path, func(file *os.File) error {
		_, err := file.Write(text)
		return err
	})
}

// writeIndex writes the new index. The bytes of a tensor stay in their shard, but its name may change.
func (j *job) writeIndex(w io.Writer) error {
	text, err := j.source.ReadIndex()
	if err != nil {
		return err
	}
	if len(j.mapping.toOld) == 0 {
		_, err = w.Write(text)
		return err
	}
	var names []string
	for _, shard := range j.source.Shards {
		for old := range shard.Tensors {
			names = append(names, j.mapping.newName(old))
		}
	}
	return checkpoint.WriteIndex(w, text, names, func(name string) string {
		shard, _ := j.source.Shard(j.mapping.oldName(name))
		return shard.Name()
	})
}

// verifyOutput verifies the staging directory and returns its manifest.
func (j *job) verifyOutput(ctx context.Context, staging string) (*Manifest, error) {
	log := logr.FromContextOrDiscard(ctx)
	log.Info("Verifying the output", "full", j.Verify)
	sums, err := (&verifier{j.source, j.mapping, j.Verify}).verify(ctx, staging, j.Parallel)
	if err != nil {
		return nil, err
	}
	m := j.newManifest()
	for _, shard := range j.source.Shards {
		plan, err := planShard(shard, j.mapping)
		if err != nil {
			return nil, err
		}
		if m.Shards[shard.Name()], err = plan.describe(filepath.Join(staging, shard.Name()), sums[shard.Name()]); err != nil {
			return nil, err
		}
	}
	for _, name := range j.outputFiles() {
		if m.Files[name], err = hashFile(filepath.Join(staging, name)); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// newManifest returns a manifest without entries for shards and files.
func (j *job) newManifest() *Manifest {
	return &Manifest{
		Format: Format, Source: j.identity, PermutationDigest: j.Permutation.Digest(), Permutation: *j.Permutation.canonical(),
		Shards: map[string]Shard{}, Files: map[string]string{}, LeftOut: j.files.leftOut,
	}
}

// outputFiles returns the names of the output's files, except the shards and the manifest.
func (j *job) outputFiles() []string {
	names := j.files.names()
	if j.source.IndexName != "" {
		names = append(names, j.source.IndexName)
	}
	return names
}

// syncTree syncs the directory entries of all files to disk; the contents of the files are already synced. It also sets
// the mode of the directories, those of an earlier run included, except directories of other users.
func syncTree(dir string) error {
	return fs.WalkDir(os.DirFS(dir), ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() {
			return err
		}
		path := filepath.Join(dir, name)
		if err := os.Chmod(path, directoryMode); err != nil && !errors.Is(err, fs.ErrPermission) {
			return err
		}
		return syncDirectory(path)
	})
}

// publish renames the finished staging directory to the output. rename(2) replaces an empty directory; os.Rename does
// not.
func (j *job) publish(staging string) error {
	switch err := unix.Rename(staging, j.out); {
	case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EXDEV):
		return checkpoint.Invalidf("%s is the mount point of a volume: use a directory below it", j.out)
	case err != nil:
		return &os.LinkError{Op: "rename", Old: staging, New: j.out, Err: err}
	}
	j.atStep("published")
	return syncDirectory(filepath.Dir(j.out))
}
