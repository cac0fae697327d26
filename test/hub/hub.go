// SPDX-License-Identifier: Apache-2.0

// Package hub is a test double of the Hugging Face hub: the part of its HTTP API that downloads of models use. It is as
// strict as the client library's handling shows (huggingface_hub 1.x, commit ee0a4510):
//   - Status codes and the header X-Error-Code of missing, private and gated repositories: src/huggingface_hub/utils/_http.py,
//     hf_raise_for_status. Missing and private repositories answer 401 to clients without a token.
//   - The tree is listed in pages, linked by the header Link: src/huggingface_hub/utils/_pagination.py. Entries have the
//     members of RepoFile and RepoFolder in src/huggingface_hub/hf_api.py. Without recursive=true, only the top level is
//     listed.
//   - The headers X-Repo-Commit, X-Linked-Size, X-Linked-Etag and ETag of files, a redirect to a signed address on another
//     host for files in LFS, and compression of other files for clients that accept it: src/huggingface_hub/file_download.py,
//     get_hf_file_metadata and http_get.
//
// The content host refuses requests with a token: object stores accept one mechanism of authentication per request.
package hub

import (
	"bytes"
	"compress/gzip"
	"crypto/sha1" // the digest of git
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Content is the content of a file.
type Content interface {
	io.ReadSeekCloser
	Size() int64
}

// Opener opens a file of a repository.
type Opener func() (Content, error)

// Bytes returns an Opener of content in memory.
func Bytes(content []byte) Opener {
	return func() (Content, error) { return memory{bytes.NewReader(content)}, nil }
}

type memory struct{ *bytes.Reader }

func (memory) Close() error { return nil }

// file is a file of a repository. oid is the digest of the git blob, or of the content of a file in LFS.
type file struct {
	open Opener
	size int64
	oid  string
	lfs  bool
}

// Repo is a repository with one commit.
type Repo struct {
	// Private repositories need a token; Gated ones answer metadata without a token, and files only to accounts that accepted
	// the terms.
	Private, Gated bool
	// Commit is the commit of Branches.
	Commit   string
	Branches []string
	files    map[string]file
}

// NewRepo returns a repository with the branch main.
func NewRepo(commit string) *Repo {
	return &Repo{Commit: commit, Branches: []string{"main"}, files: map[string]file{}}
}

// Add adds a file. Files with weights are in LFS.
func (r *Repo) Add(name string, open Opener) error {
	content, err := open()
	if err != nil {
		return err
	}
	defer content.Close()
	added := file{open: open, size: content.Size(), lfs: slices.Contains([]string{".safetensors", ".bin", ".model"}, path.Ext(name))}
	digest := sha256.New()
	if !added.lfs {
		digest = sha1.New()
		fmt.Fprintf(digest, "blob %d\x00", added.size)
	}
	if _, err := io.Copy(digest, content); err != nil {
		return err
	}
	added.oid = hex.EncodeToString(digest.Sum(nil))
	r.files[name] = added
	return nil
}

// Account is what the account of a token may read.
type Account struct {
	// Member accounts read private repositories. Accepted reports whether the terms of gated repositories are accepted.
	Member, Accepted bool
}

// Request is a request that a hub received.
type Request struct {
	Host, Path, Authorization, Range string
}

// Server is the hub. It is an http.Handler; Contents is another one, for the host of ContentURL.
type Server struct {
	Repos    map[string]*Repo
	Accounts map[string]Account
	// PageSize is the number of entries per page of a tree.
	PageSize int
	// ContentURL is the address of the handler Contents.
	ContentURL string
	// Fail returns true if it has answered the request itself; it may be nil.
	Fail func(w http.ResponseWriter, r *http.Request) bool
	// StallOnce lets the first response with the content of each file in LFS stop halfway, until the client leaves.
	StallOnce bool

	mu       sync.Mutex
	requests []Request
	stalled  map[string]bool
}

// Requests returns the requests so far.
func (s *Server) Requests() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.requests)
}

func (s *Server) record(r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests = append(s.requests, Request{r.Host, r.URL.EscapedPath(), r.Header.Get("Authorization"), r.Header.Get("Range")})
}

// fail answers an error as the hub does.
func fail(w http.ResponseWriter, status int, code, message string) {
	if code != "" {
		w.Header().Set("X-Error-Code", code)
	}
	w.Header().Set("X-Error-Message", message)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]string{"error": message})
}

func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.record(r)
	if s.Fail != nil && s.Fail(w, r) {
		return
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		fail(w, http.StatusMethodNotAllowed, "", "Method not allowed")
		return
	}
	account, ok := s.account(w, r)
	if !ok {
		return
	}
	segments := strings.Split(strings.TrimPrefix(r.URL.EscapedPath(), "/"), "/")
	api := len(segments) > 2 && segments[0] == "api" && segments[1] == "models"
	if api {
		segments = segments[2:]
	}
	verb := slices.IndexFunc(segments, func(segment string) bool {
		return api && (segment == "revision" || segment == "tree") || !api && segment == "resolve"
	})
	if verb < 1 || verb > 2 || len(segments) < verb+2 {
		fail(w, http.StatusNotFound, "", "Not found")
		return
	}
	name := strings.Join(segments[:verb], "/")
	repo := s.Repos[name]
	if repo == nil || repo.Private && !account.Member {
		if r.Header.Get("Authorization") == "" {
			fail(w, http.StatusUnauthorized, "RepoNotFound", "Repository not found")
		} else {
			fail(w, http.StatusNotFound, "RepoNotFound", "Repository not found")
		}
		return
	}
	revision, err := url.PathUnescape(segments[verb+1])
	if err != nil || revision != repo.Commit && !slices.Contains(repo.Branches, revision) {
		fail(w, http.StatusNotFound, "RevisionNotFound", "Invalid rev id: "+revision)
		return
	}
	rest, err := url.PathUnescape(strings.Join(segments[verb+2:], "/"))
	if err != nil {
		fail(w, http.StatusBadRequest, "", "Bad request")
		return
	}
	switch segments[verb] {
	case "revision":
		var siblings []map[string]string
		for name := range repo.files {
			siblings = append(siblings, map[string]string{"rfilename": name})
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{"id": name, "sha": repo.Commit, "private": repo.Private, "gated": repo.Gated, "siblings": siblings})
	case "tree":
		s.tree(w, r, repo)
	default:
		s.resolve(w, r, name, repo, rest, account)
	}
}

// account returns the account of the token. A token without an account is refused.
func (s *Server) account(w http.ResponseWriter, r *http.Request) (Account, bool) {
	authorization := r.Header.Get("Authorization")
	if authorization == "" {
		return Account{}, true
	}
	account, ok := s.Accounts[strings.TrimPrefix(authorization, "Bearer ")]
	if !ok {
		fail(w, http.StatusUnauthorized, "", "Invalid credentials in Authorization header")
	}
	return account, ok
}

// entry is an entry of a tree.
type entry struct {
	Type string `json:"type"`
	OID  string `json:"oid"`
	Size int64  `json:"size"`
	Path string `json:"path"`
	LFS  *lfs   `json:"lfs,omitempty"`
}

type lfs struct {
	OID         string `json:"oid"`
	Size        int64  `json:"size"`
	PointerSize int    `json:"pointerSize"`
}

func (s *Server) tree(w http.ResponseWriter, r *http.Request, repo *Repo) {
	recursive := r.URL.Query().Get("recursive") == "true"
	var entries []entry
	directories := map[string]bool{}
	for name, f := range repo.files {
		for dir := path.Dir(name); dir != "." && dir != "/"; dir = path.Dir(dir) {
			if !directories[dir] && (recursive || !strings.Contains(dir, "/")) {
				directories[dir] = true
				entries = append(entries, entry{Type: "directory", OID: strings.Repeat("d", 40), Path: dir})
			}
		}
		if !recursive && strings.Contains(name, "/") {
			continue
		}
		e := entry{Type: "file", OID: f.oid, Size: f.size, Path: name}
		if f.lfs {
			pointer := fmt.Sprintf("version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n", f.oid, f.size)
			blob := sha1.Sum(fmt.Appendf(nil, "blob %d\x00%s", len(pointer), pointer))
			e.OID, e.LFS = hex.EncodeToString(blob[:]), &lfs{f.oid, f.size, len(pointer)}
		}
		entries = append(entries, e)
	}
	slices.SortFunc(entries, func(a, b entry) int { return strings.Compare(a.Path, b.Path) })
	from, _ := strconv.Atoi(r.URL.Query().Get("cursor"))
	to := min(from+s.PageSize, len(entries))
	if from < 0 || from > to {
		fail(w, http.StatusBadRequest, "", "Invalid cursor")
		return
	}
	if to < len(entries) {
		query := r.URL.Query()
		query.Set("cursor", strconv.Itoa(to))
		w.Header().Set("Link", fmt.Sprintf("<http://%s%s?%s>; rel=\"next\"", r.Host, r.URL.EscapedPath(), query.Encode()))
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(entries[from:to])
}

// signature is the parameter that authorizes a request to the content host.
const signature = "X-Amz-Signature"

func (s *Server) resolve(w http.ResponseWriter, r *http.Request, name string, repo *Repo, wanted string, account Account) {
	if repo.Gated && !account.Accepted {
		if r.Header.Get("Authorization") == "" {
			fail(w, http.StatusUnauthorized, "GatedRepo", "Access to model "+name+" is restricted. You must have access to it and be authenticated to access it.")
		} else {
			fail(w, http.StatusForbidden, "GatedRepo", "Access to model "+name+" is restricted and you are not in the authorized list.")
		}
		return
	}
	f, ok := repo.files[wanted]
	if !ok {
		fail(w, http.StatusNotFound, "EntryNotFound", "Entry not found")
		return
	}
	header := w.Header()
	header.Set("X-Repo-Commit", repo.Commit)
	header.Set("Accept-Ranges", "bytes")
	if f.lfs {
		header.Set("X-Linked-Size", strconv.FormatInt(f.size, 10))
		header.Set("X-Linked-Etag", `"`+f.oid+`"`)
		query := url.Values{signature: {f.oid[:16]}}
		header.Set("Location", s.ContentURL+"/"+name+"/"+f.oid+"?"+query.Encode())
		w.WriteHeader(http.StatusFound)
		return
	}
	header.Set("ETag", `"`+f.oid+`"`)
	s.send(w, r, f)
}

// Contents is the handler of the host with the contents of files in LFS.
func (s *Server) Contents() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.record(r)
		if s.Fail != nil && s.Fail(w, r) {
			return
		}
		if r.Header.Get("Authorization") != "" {
			http.Error(w, "Only one auth mechanism allowed", http.StatusBadRequest)
			return
		}
		name, oid := path.Split(strings.TrimPrefix(r.URL.Path, "/"))
		repo := s.Repos[strings.TrimSuffix(name, "/")]
		if repo == nil || len(oid) < 16 || r.URL.Query().Get(signature) != oid[:16] {
			http.Error(w, "SignatureDoesNotMatch", http.StatusForbidden)
			return
		}
		for _, f := range repo.files {
			if f.lfs && f.oid == oid {
				s.send(w, r, f)
				return
			}
		}
		http.NotFound(w, r)
	})
}

// send sends a file, or a range of it.
func (s *Server) send(w http.ResponseWriter, r *http.Request, f file) {
	content, err := f.open()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	defer content.Close()
	if !f.lfs && strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") && r.Header.Get("Range") == "" {
		w.Header().Set("Content-Encoding", "gzip")
		compressed := gzip.NewWriter(w)
		_, _ = io.Copy(compressed, content)
		_ = compressed.Close()
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	if f.lfs && s.stalls(f.oid) {
		w = &stalling{ResponseWriter: w, request: r, left: f.size / 2}
	}
	http.ServeContent(w, r, "", time.Time{}, content)
}

// stalls reports whether a response stops halfway.
func (s *Server) stalls(oid string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.StallOnce || s.stalled[oid] {
		return false
	}
	if s.stalled == nil {
		s.stalled = map[string]bool{}
	}
	s.stalled[oid] = true
	return true
}

// stalling is a response that stops after some bytes, until the client leaves.
type stalling struct {
	http.ResponseWriter
	request *http.Request
	left    int64
}

func (s *stalling) Write(data []byte) (int, error) {
	n, err := s.ResponseWriter.Write(data[:min(int64(len(data)), s.left)])
	if s.left -= int64(n); s.left > 0 || err != nil {
		return n, err
	}
	if err := http.NewResponseController(s.ResponseWriter).Flush(); err != nil {
		return n, err
	}
	<-s.request.Context().Done()
	return n, s.request.Context().Err()
}
