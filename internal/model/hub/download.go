// SPDX-License-Identifier: Apache-2.0

package hub

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/semmoe/operator/internal/model/hub/report"
	"github.com/semmoe/operator/internal/model/reshuffle/filelock"
	"github.com/semmoe/operator/internal/model/reshuffle/progress"
)

// DefaultConnections is the default number of files that are downloaded concurrently.
const DefaultConnections = 4

// hiddenPrefix begins the names of the hidden files and directories next to an output directory.
const hiddenPrefix = ".semmoe-download-"

// Options are the inputs of a download.
type Options struct {
	// Repo is the name of the repository, Revision a branch, tag or commit.
	Repo, Revision string
	// Out is the output directory.
	Out string
	// Connections is the number of files to download concurrently.
	Connections int
}

// repoPattern matches the name of a repository.
var repoPattern = regexp.MustCompile(`^([A-Za-z0-9][A-Za-z0-9_.-]{0,95}/)?[A-Za-z0-9][A-Za-z0-9_.-]{0,95}$`)

func (o Options) check() error {
	switch {
	case !repoPattern.MatchString(o.Repo):
		return invalidf("repository %.200q is invalid: a name such as Qwen/Qwen3-30B-A3B is required", o.Repo)
	case o.Revision == "" || o.Revision == "." || o.Revision == ".." || len(o.Revision) > 255:
		return invalidf("revision %.300q is invalid: a branch, a tag or a commit is required", o.Revision)
	case o.Connections < 1:
		return invalidf("%d connections are invalid: at least 1 is required", o.Connections)
	}
	return nil
}

// Run downloads a revision of a repository into a directory, or finds it there.
func Run(ctx context.Context, client *Client, options Options, state *Progress) (*report.Result, error) {
	if err := options.check(); err != nil {
		return nil, err
	}
	start := time.Now()
	result, err := run(ctx, client, options, state)
	if err != nil {
		return nil, err
	}
	result.Seconds = time.Since(start).Round(time.Millisecond).Seconds()
	return result, nil
}

func run(ctx context.Context, client *Client, options Options, state *Progress) (*report.Result, error) {
	if found, err := find(options); found != nil || err != nil {
		return found, err
	}
	parent := filepath.Dir(options.Out)
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return nil, volumeError(err)
	}
	hidden := filepath.Join(parent, hiddenPrefix+shortHash(filepath.Base(options.Out)))
	state.setPhase(report.Waiting)
	lock, err := filelock.Wait(ctx, hidden+".lock")
	if err != nil {
		return nil, volumeError(err)
	}
	defer lock.Release()
	if found, err := find(options); found != nil || err != nil { // the run that had the lock
		return found, err
	}
	state.setPhase(report.Listing)
	commit, err := client.Commit(ctx, options.Repo, options.Revision)
	if err != nil {
		return nil, err
	}
	present, err := readManifest(options.Out)
	if err != nil {
		return nil, err
	}
	if present != nil {
		if present.Repo != options.Repo || present.Commit != commit {
			return nil, present.otherDownload(options.Out, options.Repo, commit)
		}
		return present.found(options.Out)
	}
	files, err := client.Files(ctx, options.Repo, commit)
	if err != nil {
		return nil, err
	}
	manifest := &Manifest{Version: 1, Repo: options.Repo, Revision: options.Revision, Commit: commit, Files: Select(files)}
	if err := checkCheckpoint(options.Repo, manifest.Files); err != nil {
		return nil, err
	}
	staging := hidden + "-" + shortHash(options.Repo+"@"+commit)
	if err := removeOthers(hidden, staging); err != nil {
		return nil, err
	}
	d := &download{client: client, manifest: manifest, progress: state}
	if err := d.fill(ctx, staging, options.Connections); err != nil {
		return nil, err
	}
	state.setPhase(report.Publishing)
	if err := d.publish(staging, options.Out); err != nil {
		return nil, volumeError(err)
	}
	return &report.Result{Repo: options.Repo, Commit: commit, Files: len(manifest.Files), Bytes: manifest.bytes(), Downloaded: state.received.Load()}, nil
}

// find returns the result of an earlier run with the same options; nil if there is none.
func find(options Options) (*report.Result, error) {
	manifest, err := readManifest(options.Out)
	if manifest == nil || err != nil || !manifest.matches(options.Repo, options.Revision) {
		return nil, err
	}
	return manifest.found(options.Out)
}

// found returns the result of a run that finds its output.
func (m *Manifest) found(out string) (*report.Result, error) {
	if err := m.checkFiles(out); err != nil {
		return nil, err
	}
	return &report.Result{Repo: m.Repo, Commit: m.Commit, Files: len(m.Files), Bytes: m.bytes(), Found: true}, nil
}

func shortHash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:8])
}

// removeOthers removes the incomplete downloads of other commits for the same output directory.
func removeOthers(hidden, staging string) error {
	entries, err := os.ReadDir(filepath.Dir(hidden))
	if err != nil {
		return err
	}
	for _, entry := range entries {
		name := filepath.Join(filepath.Dir(hidden), entry.Name())
		if strings.HasPrefix(name, hidden+"-") && name != staging {
			if err := os.RemoveAll(name); err != nil {
				return fmt.Errorf("failed to remove an incomplete download: %w", err)
			}
		}
	}
	return nil
}

// volumeError adds advice to errors of the volume.
func volumeError(err error) error {
	switch {
	case errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.EROFS):
		return fmt.Errorf("the volume of the model is not writable: %w. Set fsGroup, or the user that owns the volume, in spec.template.spec.securityContext", err)
	case errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT):
		return fmt.Errorf("the volume of the model is full: %w. Enlarge the volume; the download then resumes", err)
	}
	return err
}

// download is the download of the files of a manifest.
type download struct {
	client   *Client
	manifest *Manifest
	root     *os.Root
	progress *Progress
}

// fill downloads the files into the staging directory, which may contain some of them.
func (d *download) fill(ctx context.Context, staging string, connections int) error {
	if err := os.MkdirAll(staging, 0o755); err != nil {
		return volumeError(err)
	}
	root, err := os.OpenRoot(staging)
	if err != nil {
		return volumeError(err)
	}
	defer root.Close()
	d.root = root
	d.progress.start(len(d.manifest.Files), d.manifest.bytes())
	defer progress.Log(ctx, "Downloading", d.manifest.bytes(), &d.progress.bytes)()
	if err := d.checkSpace(staging); err != nil {
		return err
	}
	largestFirst := slices.SortedFunc(slices.Values(d.manifest.Files), func(a, b File) int { return int(min(max(b.Size-a.Size, -1), 1)) })
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(connections)
	for _, file := range largestFirst {
		group.Go(func() error {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err := d.fetch(ctx, file); err != nil {
				return volumeError(err)
			}
			d.progress.files.Add(1)
			return nil
		})
	}
	return group.Wait()
}

// checkSpace returns an error if the volume has not enough free space for the missing files. File systems that report no
// free space are not checked.
func (d *download) checkSpace(staging string) error {
	needed := d.manifest.bytes()
	for _, file := range d.manifest.Files {
		for _, name := range []string{file.Path, file.Path + partialSuffix} {
			if info, err := d.root.Lstat(name); err == nil && info.Mode().IsRegular() {
				needed -= min(info.Size(), file.Size)
			}
		}
	}
	var volume unix.Statfs_t
	if err := unix.Statfs(staging, &volume); err != nil || volume.Blocks == 0 {
		return nil
	}
	if free := int64(volume.Bavail) * volume.Bsize; free < needed {
		return fmt.Errorf("the volume of the model has too little free space: %d of %d bytes are missing, and %d are free. Enlarge the volume; the download then resumes",
			needed, d.manifest.bytes(), free)
	}
	return nil
}

// publish writes the manifest, syncs the directories, and renames the staging directory to the output directory.
func (d *download) publish(staging, out string) error {
	root, err := os.OpenRoot(staging)
	if err != nil {
		return err
	}
	defer root.Close()
	if err := d.manifest.write(root); err != nil {
		return err
	}
	directories := map[string]bool{".": true}
	for _, file := range d.manifest.Files {
		for dir := path.Dir(file.Path); dir != "."; dir = path.Dir(dir) {
			directories[dir] = true
		}
	}
	for dir := range directories {
		if err := syncDirectory(filepath.Join(staging, dir)); err != nil {
			return err
		}
	}
	if err := os.Rename(staging, out); err != nil {
		return err
	}
	return syncDirectory(filepath.Dir(out))
}

func syncDirectory(name string) error {
	directory, err := os.Open(name)
	if err != nil {
		return err
	}
	return errors.Join(directory.Sync(), directory.Close())
}
