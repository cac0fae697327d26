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

	"github.com/semmoe/operator/internal/checkpoint"
	"github.com/semmoe/operator/internal/reshuffle/filelock"
	"github.com/semmoe/operator/internal/reshuffle/progress"
)

// DefaultParallel is how many shards are written at a time unless asked otherwise: enough to keep a disk busy.
const DefaultParallel = 4

// Options say what to make.
type Options struct {
	// Model is the directory of the checkpoint; it is only read.
	Model string
	// Permutation is the order of the experts.
	Permutation *Permutation
	// Out is the directory to make. It must not exist, be empty, or be the result of the same work.
	Out string
	// Verify re-reads input and output and compares every byte.
	Verify bool
	// Parallel is how many shards are written at a time; 0 means DefaultParallel.
	Parallel int
	// Limit bounds the bytes of all outputs in Out's parent directory: to make room for a new one, those are removed that
	// nobody uses. 0 means no limit: nothing is removed.
	Limit int64

	// grace is how long an output stays after its last use, for tests; 0 means useGrace.
	grace time.Duration
	// atStep is called between the steps, for tests that end the process there.
	atStep func(step string)
}

// Result tells what was made.
type Result struct {
	// Reused is true where the output was there already; Resumed counts the shards that an earlier run had left.
	Reused  bool `json:"reused"`
	Resumed int  `json:"resumed_shards"`
	// Verified is true: a result has passed the check of its names and a sample of its bytes, or there is none. Compared is true where
	// every byte was compared, too.
	Verified          bool   `json:"verified"`
	Compared          bool   `json:"compared"`
	SourceDigest      string `json:"source_digest"`
	ModelDigest       string `json:"model_digest"`
	PermutationDigest string `json:"permutation_digest"`
	Layers            int    `json:"layers"`
	Shards            int    `json:"shards"`
	// Bytes is the size of the shards' data, Seconds the time of the whole run.
	Bytes   int64   `json:"bytes"`
	Seconds float64 `json:"seconds"`
	// Method is the dearest way of copying that was needed: reflink, copy_file_range or buffered.
	Method  string   `json:"method,omitempty"`
	LeftOut []string `json:"left_out,omitempty"`
}

// Run makes the output, or finds it. Faults of the input are *checkpoint.InvalidError; after any other error, and after
// the process was killed, another run goes on where this one ended.
func Run(ctx context.Context, o Options) (*Result, error) {
	result, hold, err := Acquire(ctx, o)
	if err != nil {
		return nil, err
	}
	hold.Release()
	return result, nil
}

// Acquire does what Run does, and keeps the output from being removed until the hold is released, or the process ends.
func Acquire(ctx context.Context, o Options) (*Result, *Hold, error) {
	start := time.Now()
	j, err := newJob(ctx, o)
	if err != nil {
		return nil, nil, err
	}
	defer j.close()
	if err := os.MkdirAll(filepath.Dir(j.out), directoryMode); err != nil {
		return nil, nil, j.noDirectory(err)
	}
	if j.lock, err = filelock.Wait(ctx, hidden(j.out, lockSuffix)); err != nil {
		return nil, nil, err
	}
	defer j.lock.Release()
	// The hold begins before the output is there, and the run's own lock ends after: there is no moment without either.
	hold, err := newHold(j.out)
	if err != nil {
		return nil, nil, err
	}
	result, err := j.run(ctx)
	if err == nil {
		err = hold.touch()
	}
	if err != nil {
		hold.abandon()
		return nil, nil, err
	}
	result.Seconds = time.Since(start).Seconds()
	return result, hold, nil
}

// job is the work of one run, of which everything that can be refused has been checked.
type job struct {
	Options
	out      string // absolute
	source   *checkpoint.Checkpoint
	identity Source
	mapping  *mapping
	files    *sourceFiles
	copier   copier
	// lock is the output's.
	lock filelock.Lock
}

func newJob(ctx context.Context, o Options) (*job, error) {
	j := &job{Options: o}
	if j.Parallel == 0 {
		j.Parallel = DefaultParallel
	}
	if j.Parallel < 1 {
		return nil, checkpoint.Invalidf("%d shards at a time; it must be at least 1", j.Parallel)
	}
	if j.Limit < 0 {
		return nil, checkpoint.Invalidf("a limit of %d bytes; it must be positive, or 0 for none", j.Limit)
	}
	if j.grace == 0 {
		j.grace = useGrace
	}
	if j.atStep == nil {
		j.atStep = func(string) {}
	}
	var err error
	if j.out, err = separate(o.Model, o.Out); err != nil {
		return nil, err
	}
	if j.source, err = checkpoint.Open(o.Model); err != nil {
		return nil, err
	}
	if err := j.prepare(ctx); err != nil {
		j.close()
		return nil, err
	}
	return j, nil
}

// close closes the input and forgets its headers; the job cannot read any more.
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

// separate requires that neither directory lies in the other, and returns the output's absolute path.
func separate(model, out string) (string, error) {
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
		return "", checkpoint.Invalidf("output %s and model %s overlap: name a directory beside the model", out, model)
	}
	return absolute, nil
}

// resolve follows the links of as much of a path as exists.
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

// hidden is a name beside an output that no reader takes for it.
func hidden(out, suffix string) string {
	return filepath.Join(filepath.Dir(out), "."+filepath.Base(out)+suffix)
}

func (j *job) run(ctx context.Context) (*Result, error) {
	// This run may have waited for hours for another one, and the model have other files now.
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
	workplace := workplaceOf(j.out, identity(j.identity, result.PermutationDigest))
	if err := j.removeOthers(workplace); err != nil {
		return nil, err
	}
	if err := j.makeRoom(ctx, workplace); err != nil {
		return nil, err
	}
	manifest, resumed, err := j.make(ctx, workplace)
	if err != nil {
		return nil, err
	}
	if err := j.finish(workplace, manifest); err != nil {
		return nil, err
	}
	result.Resumed, result.ModelDigest = resumed, manifest.ModelDigest
	if resumed < result.Shards {
		result.Method = Method(j.copier.worst.Load()).String()
	}
	return result, nil
}

// existing returns the manifest of an output of the same work, which it brings up to date; nil if there is no output yet.
func (j *job) existing(ctx context.Context) (*Manifest, error) {
	entries, err := os.ReadDir(j.out)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(entries) == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, j.noDirectory(err)
	}
	m, found, err := readManifest(j.out)
	if err != nil {
		return nil, err
	}
	if !found {
		return nil, checkpoint.Invalidf("%s is not empty and was not made by reshuffle: name another directory", j.out)
	}
	if why := m.sameWork(j.identity, j.Permutation); why != "" {
		return nil, checkpoint.Invalidf("%s holds another checkpoint: %s; remove it or name another directory", j.out, why)
	}
	if err := j.refresh(ctx, m); err != nil {
		return nil, err
	}
	return m, m.check(j.out)
}

// noDirectory tells an output that can be none from other failures, which another run may not meet.
func (j *job) noDirectory(err error) error {
	if errors.Is(err, unix.ENOTDIR) {
		return checkpoint.Invalidf("output %s is a file, or lies below one (%v): name a directory", j.Out, err)
	}
	return err
}

// reverify compares an existing output in full if asked to, and completes its manifest.
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

// workplaceOf is the directory in which this user makes the output of some work. One that another user has left and keeps closed is not
// waited for, as its user may never come back: this user has another then.
func workplaceOf(out, identity string) string {
	workplace := hidden(out, fmt.Sprintf(".%.16s.partial", identity))
	if closedDirectory(workplace) {
		return hidden(out, fmt.Sprintf(".%.16s.partial", digest([]byte(fmt.Sprintf("%s\nuser %d\n", identity, os.Geteuid())))))
	}
	return workplace
}

// closedDirectory reports whether this user may not change what is in a directory, which so is another's.
func closedDirectory(path string) bool {
	return errors.Is(unix.Access(path, unix.W_OK), fs.ErrPermission)
}

// workplaceName matches the base name of a workplace, and has its output's.
var workplaceName = regexp.MustCompile(`^\.(.+)\.[0-9a-f]{16}\.partial$`)

// workplaces lists what runs have left of an output.
func workplaces(out string) ([]string, error) {
	entries, err := os.ReadDir(filepath.Dir(out))
	if err != nil {
		return nil, err
	}
	var paths []string
	for _, entry := range entries {
		if match := workplaceName.FindStringSubmatch(entry.Name()); match != nil && match[1] == filepath.Base(out) && entry.IsDir() {
			paths = append(paths, filepath.Join(filepath.Dir(out), entry.Name()))
		}
	}
	return paths, nil
}

// removeOthers removes what runs with another model or permutation have left of the same output, but for what is another user's. The lock
// tells that none of them is at work.
func (j *job) removeOthers(workplace string) error {
	left, err := workplaces(j.out)
	if err != nil {
		return err
	}
	for _, path := range left {
		if path == workplace {
			continue
		}
		if err := os.RemoveAll(path); err != nil && !errors.Is(err, fs.ErrPermission) {
			return err
		}
	}
	return nil
}

// make fills the workplace until it is the whole output.
func (j *job) make(ctx context.Context, workplace string) (*Manifest, int, error) {
	if err := makeWorkplace(workplace); err != nil {
		return nil, 0, err
	}
	if err := j.prune(workplace); err != nil {
		return nil, 0, err
	}
	resumed, err := j.writeShards(ctx, workplace)
	if err != nil {
		return nil, 0, err
	}
	if err := j.writeFiles(ctx, workplace); err != nil {
		return nil, 0, err
	}
	manifest, err := j.prove(ctx, workplace)
	return manifest, resumed, err
}

// makeWorkplace makes a workplace that other users may look into, whatever the umask: what is left of it counts for them. One that is there
// must be a directory: others may write beside it, and a link of theirs would lead to what is then emptied.
func makeWorkplace(path string) error {
	switch err := os.Mkdir(path, directoryMode); {
	case err == nil:
		return os.Chmod(path, directoryMode)
	case !errors.Is(err, fs.ErrExist):
		return err
	}
	if info, err := os.Lstat(path); err != nil || info.IsDir() {
		return err
	}
	return fmt.Errorf("%s is a link, or something else that is no directory: remove it", path)
}

// finish completes the manifest of a filled workplace and gives it its name.
func (j *job) finish(workplace string, manifest *Manifest) error {
	j.close() // the headers of the input make room for those of the output
	report, err := checkpoint.Inspect(workplace)
	if err != nil {
		return fmt.Errorf("the output is not valid: %w", err)
	}
	manifest.ModelDigest = report.ModelDigest
	j.atStep("verified")
	if err := manifest.write(workplace); err != nil {
		return err
	}
	j.atStep("manifest")
	if err := syncTree(workplace); err != nil {
		return err
	}
	return j.publish(workplace)
}

// prune removes what an earlier run has left and this one does not make.
func (j *job) prune(workplace string) error {
	keep := map[string]bool{}
	for _, shard := range j.source.Shards {
		keep[shard.Name()] = true
	}
	for _, name := range j.files.names() {
		keep[name] = true
	}
	return fs.WalkDir(os.DirFS(workplace), ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || keep[name] {
			return err
		}
		return os.Remove(filepath.Join(workplace, name))
	})
}

// writeShards copies the shards that are not there yet, several at a time, and counts the others.
func (j *job) writeShards(ctx context.Context, workplace string) (resumed int, err error) {
	missing, err := j.missing(workplace)
	if err != nil {
		return 0, err
	}
	defer progress.Log(ctx, j.copier.total, &j.copier.done)()
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(j.Parallel)
	for _, shard := range missing {
		plan, err := planShard(shard, j.mapping)
		if err != nil {
			return 0, errors.Join(err, group.Wait())
		}
		group.Go(func() error {
			err := plan.write(ctx, &j.copier, filepath.Join(workplace, shard.Name()))
			j.atStep("shard")
			return err
		})
	}
	return len(j.source.Shards) - len(missing), group.Wait()
}

// missing lists the shards that are not there yet. The others are done before the first copy asks how much room the rest needs; plans are
// not kept, as their headers take memory.
func (j *job) missing(workplace string) (missing []*checkpoint.File, err error) {
	for _, shard := range j.source.Shards {
		plan, err := planShard(shard, j.mapping)
		if err != nil {
			return nil, err
		}
		written, err := plan.written(filepath.Join(workplace, shard.Name()))
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

// writeFiles writes everything else but the manifest.
func (j *job) writeFiles(ctx context.Context, workplace string) error {
	for _, name := range j.files.copied {
		if err := j.writeFile(ctx, workplace, name); err != nil {
			return err
		}
		j.atStep("file")
	}
	for name := range j.files.rewritten {
		if err := j.writeFile(ctx, workplace, name); err != nil {
			return err
		}
		j.atStep("configuration")
	}
	if j.source.IndexName == "" {
		return nil
	}
	defer j.atStep("index")
	return writeAtomically(filepath.Join(workplace, j.source.IndexName), func(file *os.File) error { return j.writeIndex(file) })
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

// writeIndex writes the new index: a tensor's bytes stay in their shard, its name may now be another's.
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

// prove verifies the workplace and describes it.
func (j *job) prove(ctx context.Context, workplace string) (*Manifest, error) {
	log := logr.FromContextOrDiscard(ctx)
	log.Info("Verifying", "full", j.Verify)
	sums, err := (&verifier{j.source, j.mapping, j.Verify}).verify(ctx, workplace, j.Parallel)
	if err != nil {
		return nil, err
	}
	m := j.newManifest()
	for _, shard := range j.source.Shards {
		plan, err := planShard(shard, j.mapping)
		if err != nil {
			return nil, err
		}
		if m.Shards[shard.Name()], err = plan.describe(filepath.Join(workplace, shard.Name()), sums[shard.Name()]); err != nil {
			return nil, err
		}
	}
	for _, name := range j.outputFiles() {
		if m.Files[name], err = hashFile(filepath.Join(workplace, name)); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// newManifest describes the work; shards and files are still to be described.
func (j *job) newManifest() *Manifest {
	return &Manifest{
		Format: Format, Source: j.identity, PermutationDigest: j.Permutation.Digest(), Permutation: *j.Permutation.canonical(),
		Shards: map[string]Shard{}, Files: map[string]string{}, LeftOut: j.files.leftOut,
	}
}

// outputFiles names the files of the output besides the shards and the manifest.
func (j *job) outputFiles() []string {
	names := j.files.names()
	if j.source.IndexName != "" {
		names = append(names, j.source.IndexName)
	}
	return names
}

// syncTree puts the names of all files on disk; their contents are. Directories get their mode here, those of a run
// before as well, unless they are another user's.
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

// publish gives the finished output its name. The system's call takes the place of an empty directory; os.Rename takes that of none.
func (j *job) publish(workplace string) error {
	switch err := unix.Rename(workplace, j.out); {
	case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EXDEV):
		return checkpoint.Invalidf("%s is where a volume is mounted: name a directory below it", j.out)
	case err != nil:
		return &os.LinkError{Op: "rename", Old: workplace, New: j.out, Err: err}
	}
	j.atStep("published")
	return syncDirectory(filepath.Dir(j.out))
}
