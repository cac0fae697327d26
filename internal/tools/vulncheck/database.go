// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// The pinned module and its checksum in go.sum format. Update both to include newer vulnerabilities.
const (
	module   = "golang.org/x/vulndb@v0.0.0-20261105234957-e22db6528018"
	checksum = "h1:mfngRv0Yoh0VApsXKEN82CjD99kl7mtparN3bs3JnqI="
)

// errDownload reports a failed download, for example without access to the module proxy.
var errDownload = errors.New("failed to download the vulnerability database")

type report struct {
	ID       string    `json:"id"`
	Modified time.Time `json:"modified"`
	Aliases  []string  `json:"aliases,omitempty"`
	Affected []struct {
		Package struct {
			Name string `json:"name"`
		} `json:"package"`
		Ranges []struct {
			Events []struct {
				Fixed string `json:"fixed"`
			} `json:"events"`
		} `json:"ranges"`
	} `json:"affected"`
}

type vulnerability struct {
	ID       string    `json:"id"`
	Modified time.Time `json:"modified"`
	Fixed    string    `json:"fixed,omitempty"`
	Aliases  []string  `json:"aliases,omitempty"`
}

type affectedModule struct {
	Path  string          `json:"path"`
	Vulns []vulnerability `json:"vulns"`
}

// writeDatabase writes a vulnerability database for govulncheck to dir, unless dir already contains the pinned version.
// The reports come from a module of the Go module proxy, so that vuln.go.dev is not needed. Layout:
// https://go.dev/doc/security/vuln/database#api.
func writeDatabase(dir string) error {
	stamp := filepath.Join(dir, "version")
	if version, err := os.ReadFile(stamp); err == nil && string(version) == module {
		return nil
	}
	source, err := download()
	if err != nil {
		return err
	}
	files, err := filepath.Glob(filepath.Join(source, "data", "osv", "GO-*.json"))
	if err != nil || len(files) == 0 {
		return fmt.Errorf("%s has no reports: %w", module, err)
	}
	if err := errors.Join(os.MkdirAll(filepath.Join(dir, "ID"), 0o755), os.MkdirAll(filepath.Join(dir, "index"), 0o755)); err != nil {
		return err
	}
	var latest time.Time
	var all []vulnerability
	modules := map[string][]vulnerability{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		var r report
		if err := json.Unmarshal(text, &r); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		if err := os.WriteFile(filepath.Join(dir, "ID", r.ID+".json"), text, 0o644); err != nil {
			return err
		}
		if r.Modified.After(latest) {
			latest = r.Modified
		}
		all = append(all, vulnerability{ID: r.ID, Modified: r.Modified, Aliases: r.Aliases})
		for path, fixed := range r.modules() {
			modules[path] = append(modules[path], vulnerability{ID: r.ID, Modified: r.Modified, Fixed: fixed})
		}
	}
	var affected []affectedModule
	for path, vulns := range modules {
		affected = append(affected, affectedModule{path, vulns})
	}
	slices.SortFunc(affected, func(a, b affectedModule) int { return strings.Compare(a.Path, b.Path) })
	for name, content := range map[string]any{"db": map[string]time.Time{"modified": latest}, "vulns": all, "modules": affected} {
		text, err := json.Marshal(content)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, "index", name+".json"), text, 0o644); err != nil {
			return err
		}
	}
	return os.WriteFile(stamp, []byte(module), 0o644)
}

// modules returns the affected modules, and the last version that fixes each of them.
func (r *report) modules() map[string]string {
	fixed := map[string]string{}
	for _, a := range r.Affected {
		last := ""
		for _, one := range a.Ranges {
			for _, event := range one.Events {
				if event.Fixed != "" {
					last = event.Fixed
				}
			}
		}
		fixed[a.Package.Name] = last
	}
	return fixed
}

// download returns the directory of the pinned module in the module cache.
func download() (string, error) {
	command := exec.Command("go", "mod", "download", "-json", module)
	command.Dir = os.TempDir() // the module is not a dependency
	output, err := command.Output()
	var info struct{ Dir, Sum, Error string }
	if parseErr := json.NewDecoder(bytes.NewReader(output)).Decode(&info); err != nil || parseErr != nil {
		return "", fmt.Errorf("%w: go mod download %s: %s", errDownload, module, strings.Join(strings.Fields(info.Error), " "))
	}
	if info.Sum != checksum {
		return "", fmt.Errorf("%s has the checksum %s, want %s", module, info.Sum, checksum)
	}
	return info.Dir, nil
}
