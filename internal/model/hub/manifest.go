// SPDX-License-Identifier: Apache-2.0

package hub

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/semmoe/operator/internal/files/regularfile"
)

// ManifestFile is the name of the file in an output directory that describes it.
const ManifestFile = ".semmoe-download.json"

// maxManifest is the maximum size of a manifest in bytes.
const maxManifest = 64 << 20

// Manifest describes a complete download.
type Manifest struct {
	// Version is the version of the format: 1.
	Version int `json:"version"`
	// Repo and Revision are as requested; Commit is what the revision was at that time.
	Repo     string `json:"repo"`
	Revision string `json:"revision"`
	Commit   string `json:"commit"`
	Files    []File `json:"files"`
}

func (m *Manifest) bytes() int64 {
	var sum int64
	for _, file := range m.Files {
		sum += file.Size
	}
	return sum
}

// readManifest returns the manifest of an output directory; nil if the directory does not exist or is empty. A directory
// without a manifest is an error, because its content is not that of a download.
func readManifest(out string) (*Manifest, error) {
	entries, err := os.ReadDir(out)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(entries) == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	path := filepath.Join(out, ManifestFile)
	file, err := regularfile.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, invalidf("%s contains files that are not from a download. Use another directory, or remove the files", out)
	}
	if err != nil {
		return nil, err
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, maxManifest))
	if err != nil {
		return nil, err
	}
	var m Manifest
	if err := json.Unmarshal(text, &m); err != nil || m.Version != 1 {
		return nil, invalidf("%s is no manifest of a download: remove the directory to download the model again", path)
	}
	return &m, nil
}

// checkFiles returns an error if a file of the manifest is missing or has another size.
func (m *Manifest) checkFiles(out string) error {
	root, err := os.OpenRoot(out)
	if err != nil {
		return err
	}
	defer root.Close()
	for _, file := range m.Files {
		if info, err := root.Lstat(file.Path); err != nil || !info.Mode().IsRegular() || info.Size() != file.Size {
			return invalidf("%s was changed after the download: file %s is missing or has another size. Remove the directory to download the model again", out, file.Path)
		}
	}
	return nil
}

// otherDownload returns the error of an output directory with another download.
func (m *Manifest) otherDownload(out, repo, commit string) error {
	return invalidf("%s contains %s at commit %s, not %s at commit %s. Pods may read it, so it is not replaced: use another directory (spec.model.path)", out, m.Repo, m.Commit, repo, commit)
}

// matches reports whether the manifest is of the requested revision, without asking the hub which commit a branch is
// now.
func (m *Manifest) matches(repo, revision string) bool {
	return m.Repo == repo && (m.Revision == revision || m.Commit == revision)
}

// write writes the manifest into a directory.
func (m *Manifest) write(root *os.Root) error {
	text, err := json.MarshalIndent(m, "", " ")
	if err != nil {
		return err
	}
	file, err := root.Create(ManifestFile)
	if err != nil {
		return fmt.Errorf("failed to write the manifest: %w", err)
	}
	_, err = file.Write(append(text, '\n'))
	return errors.Join(err, file.Sync(), file.Close())
}
