// SPDX-License-Identifier: Apache-2.0

package hub

import (
	"context"
	"fmt"
	"net/url"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"unicode"
)

const (
	// maxEntries is the maximum number of entries of a repository, maxPages that of the pages that list them.
	maxEntries = 100_000
	maxPages   = 1_000
	// maxPath is the maximum length, in bytes, of a path in a repository, maxName that of a name in the path without
	// partialSuffix.
	maxPath = 1024
	maxName = 255 - len(partialSuffix)
	// maxBytes is the maximum size, in bytes, of all files: 64 TiB.
	maxBytes = 1 << 46
)

// File is a file of a repository.
type File struct {
	// Path is relative, with slashes.
	Path string `json:"path"`
	Size int64  `json:"size"`
	// SHA256 is the digest of the content, of a file in LFS. GitSHA1 is the digest of the git blob, of other files.
	SHA256  string `json:"sha256,omitempty"`
	GitSHA1 string `json:"gitSHA1,omitempty"`
}

var (
	commitPattern = regexp.MustCompile(`^[0-9a-f]{40}$`)
	sha256Pattern = regexp.MustCompile(`^[0-9a-f]{64}$`)
	nextPattern   = regexp.MustCompile(`<([^>]*)>\s*;[^,<]*\brel="?next"?`)
)

// Commit returns the commit of a revision: a branch, a tag or a commit.
func (c *Client) Commit(ctx context.Context, repo, revision string) (string, error) {
	var info struct {
		SHA string `json:"sha"`
	}
	about := fmt.Sprintf("revision %q of %s", revision, repo)
	segments := append(append([]string{"api", "models"}, escaped(repo)...), "revision", url.PathEscape(revision))
	if _, err := c.getJSON(ctx, c.address(segments...), about, &info); err != nil {
		return "", err
	}
	if !commitPattern.MatchString(info.SHA) {
		return "", invalidf("failed to read %s: %s returns no commit", about, c.endpoint.Host)
	}
	return info.SHA, nil
}

// treeEntry is an entry of a page of /api/models/{repo}/tree/{revision} (huggingface_hub, src/huggingface_hub/hf_api.py,
// RepoFile and RepoFolder).
type treeEntry struct {
	Type string `json:"type"`
	Path string `json:"path"`
	Size int64  `json:"size"`
	OID  string `json:"oid"`
	LFS  *struct {
		OID  string `json:"oid"`
		Size int64  `json:"size"`
	} `json:"lfs"`
}

// Files lists the files of a commit. Pages are linked by the header Link.
func (c *Client) Files(ctx context.Context, repo, commit string) ([]File, error) {
	about := "the files of " + repo
	segments := append(append([]string{"api", "models"}, escaped(repo)...), "tree", commit)
	next := c.address(segments...)
	next.RawQuery = "recursive=true"
	var files []File
	entries := 0
	for range maxPages {
		var page []treeEntry
		header, err := c.getJSON(ctx, next, about, &page)
		if err != nil {
			return nil, err
		}
		if entries += len(page); entries > maxEntries {
			return nil, invalidf("%s has more than %d files and directories", repo, maxEntries)
		}
		for _, entry := range page {
			if entry.Type == "directory" {
				continue
			}
			file, err := entry.file()
			if err != nil {
				return nil, invalidf("failed to read %s: %w", about, err)
			}
			files = append(files, file)
		}
		match := nextPattern.FindStringSubmatch(strings.Join(header.Values("Link"), ", "))
		if match == nil {
			return files, checkTogether(files)
		}
		if next, err = next.Parse(match[1]); err != nil {
			return nil, invalidf("failed to read %s: the link to the next page is not a URL", about)
		}
	}
	return nil, invalidf("%s has more than %d pages of files", repo, maxPages)
}

func (e treeEntry) file() (File, error) {
	file := File{Path: e.Path, Size: e.Size, GitSHA1: e.OID}
	if err := checkPath(e.Path); err != nil {
		return File{}, err
	}
	if e.LFS != nil {
		file = File{Path: e.Path, Size: e.LFS.Size, SHA256: e.LFS.OID}
	}
	switch {
	case e.Type != "file":
		return File{}, fmt.Errorf("%q has type %q; only files and directories are supported", e.Path, e.Type)
	case file.Size < 0 || file.Size > maxBytes:
		return File{}, fmt.Errorf("%q has size %d", e.Path, file.Size)
	case !sha256Pattern.MatchString(file.SHA256) && !commitPattern.MatchString(file.GitSHA1):
		return File{}, fmt.Errorf("%q has no digest", e.Path)
	}
	return file, nil
}

// checkPath returns an error for a path that is not a plain relative path.
func checkPath(p string) error {
	plain := p != "" && len(p) <= maxPath && p == path.Clean(p) && p != "." && filepath.IsLocal(p) && !strings.Contains(p, `\`) &&
		!strings.ContainsFunc(p, func(r rune) bool { return r == unicode.ReplacementChar || !unicode.IsPrint(r) })
	for name := range strings.SplitSeq(p, "/") {
		plain = plain && len(name) <= maxName
	}
	if !plain {
		return fmt.Errorf("path %.100q is not allowed: paths must be relative, without '..', '\\' and control characters, with at most %d bytes", p, maxPath)
	}
	return nil
}

// checkTogether returns an error if two files exclude each other, or if all files together are too large.
func checkTogether(files []File) error {
	var bytes int64
	known := map[string]bool{}
	for _, file := range files {
		if known[file.Path] {
			return invalidf("path %q is listed twice", file.Path)
		}
		known[file.Path] = true
		if bytes += file.Size; bytes > maxBytes {
			return invalidf("the files have more than %d bytes", int64(maxBytes))
		}
	}
	for _, file := range files {
		if known[file.Path+partialSuffix] {
			return invalidf("path %q is reserved while %q is incomplete", file.Path+partialSuffix, file.Path)
		}
		for dir := path.Dir(file.Path); dir != "."; dir = path.Dir(dir) {
			if known[dir] {
				return invalidf("path %q is a file and a directory", dir)
			}
		}
	}
	return nil
}

var (
	// ignoredDirectories are directories in which repositories keep the weights in the formats of other programs.
	ignoredDirectories = []string{"original", "metal", "onnx", "coreml", "openvino"}
	// ignoredSuffixes are the weights of other programs, and media.
	ignoredSuffixes = []string{
		".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".ot", ".onnx", ".onnx_data", ".tflite", ".gguf", ".ggml", ".pkl", ".npz", ".mlmodel",
		".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg", ".pdf", ".mp4", ".mp3", ".wav",
	}
	// shardOfTransformers matches the shards that an index of transformers names. consolidated matches the same weights in
	// the format of Mistral.
	shardOfTransformers = regexp.MustCompile(`^model(-\d+-of-\d+)?\.safetensors$`)
	consolidated        = regexp.MustCompile(`^consolidated.*\.safetensors(\.index\.json)?$`)
)

// Select returns the files that engines read, sorted by path: all files except hidden ones, media, and weights that are
// not in the format safetensors, or a second time in it.
func Select(files []File) []File {
	both := slices.ContainsFunc(files, func(f File) bool { return shardOfTransformers.MatchString(f.Path) })
	selected := slices.DeleteFunc(slices.Clone(files), func(f File) bool {
		for name := range strings.SplitSeq(f.Path, "/") {
			if strings.HasPrefix(name, ".") {
				return true
			}
		}
		directory, _, nested := strings.Cut(f.Path, "/")
		suffix := strings.ToLower(path.Ext(f.Path))
		return nested && slices.Contains(ignoredDirectories, directory) || slices.Contains(ignoredSuffixes, suffix) || both && consolidated.MatchString(f.Path)
	})
	slices.SortFunc(selected, func(a, b File) int { return strings.Compare(a.Path, b.Path) })
	return selected
}

// checkCheckpoint returns an error if the files are no checkpoint in the format that the operator reads.
func checkCheckpoint(repo string, files []File) error {
	for _, needed := range []struct {
		name    string
		matches func(name string) bool
	}{
		{"config.json", func(name string) bool { return name == "config.json" }},
		{"*.safetensors in the layout of transformers", func(name string) bool {
			return strings.HasSuffix(name, ".safetensors") && !consolidated.MatchString(name) && !strings.HasPrefix(name, "adapter")
		}},
	} {
		if !slices.ContainsFunc(files, func(f File) bool { return needed.matches(f.Path) && !strings.Contains(f.Path, "/") }) {
			return invalidf("%s contains no file %s, so it is no checkpoint in the format safetensors", repo, needed.name)
		}
	}
	return nil
}
