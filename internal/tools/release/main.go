// SPDX-License-Identifier: Apache-2.0

// Command release writes the files of a release from its binaries: an archive for each program and platform, a bill of
// materials for each archive, the manifest of the kubectl plugin for Krew, and checksums of all files. build.sh runs it.
// The same binaries give the same bytes.
package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"debug/buildinfo"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

const (
	repository = "https://github.com/semmoe/operator"
	plugin     = "kubectl-semmoe"
	checksums  = "checksums.txt"
)

func main() {
	bin := flag.String("bin", "", "directory with the binaries, as OS_ARCHITECTURE/PROGRAM")
	out := flag.String("out", "", "directory of the release, which may already have a chart and images")
	version := flag.String("version", "", "version of the release, which each binary must have")
	licence := flag.String("license", "", "file with the license, a part of each archive")
	flag.Parse()
	if err := run(*bin, *out, *version, *licence); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

// binary is a program for a platform.
type binary struct {
	program, system, architecture string
	content                       []byte
	info                          *buildinfo.BuildInfo
}

// name is the name of the files of the binary, without their extensions.
func (b *binary) name(version string) string {
	return strings.Join([]string{strings.TrimSuffix(b.program, ".exe"), version, b.system, b.architecture}, "_")
}

func run(bin, out, version, licence string) error {
	if bin == "" || out == "" || version == "" || licence == "" {
		return errors.New("--bin, --out, --version and --license are required")
	}
	text, err := os.ReadFile(licence)
	if err != nil {
		return err
	}
	paths, err := filepath.Glob(filepath.Join(bin, "*_*", "*"))
	if err != nil || len(paths) == 0 {
		return errors.Join(fmt.Errorf("--bin: %s has no binaries", bin), err)
	}
	var platforms []krewPlatform
	for _, path := range paths {
		b, err := readBinary(path, version)
		if err != nil {
			return err
		}
		archive, err := pack(b, text)
		if err != nil {
			return err
		}
		bill, err := billOfMaterials(b.name(version), b.content, b.info)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		name := b.name(version)
		if err := errors.Join(write(out, name+".tar.gz", archive), write(out, name+".spdx.json", bill)); err != nil {
			return err
		}
		if strings.HasPrefix(b.program, plugin) {
			platforms = append(platforms, krewPlatformOf(b, version, archive))
		}
	}
	manifest, err := krewManifest(version, platforms)
	if err != nil {
		return err
	}
	if err := write(out, "semmoe.yaml", manifest); err != nil {
		return err
	}
	return writeChecksums(out)
}

// readBinary reads a binary and verifies its version and platform, which the Go toolchain has stored in it.
func readBinary(path, version string) (*binary, error) {
	system, architecture, _ := strings.Cut(filepath.Base(filepath.Dir(path)), "_")
	b := &binary{program: filepath.Base(path), system: system, architecture: architecture}
	var err error
	if b.content, err = os.ReadFile(path); err != nil {
		return nil, err
	}
	if b.info, err = buildinfo.Read(bytes.NewReader(b.content)); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if b.info.Main.Version != version {
		return nil, fmt.Errorf("%s: version %s is invalid: it must be %s, which a build of the clean checkout of this tag has", path, b.info.Main.Version, version)
	}
	if s, a := setting(b.info, "GOOS"), setting(b.info, "GOARCH"); s != system || a != architecture {
		return nil, fmt.Errorf("%s: the binary is for %s_%s", path, s, a)
	}
	return b, nil
}

// pack returns a tar.gz with the program and the license, without times and owners.
func pack(b *binary, licence []byte) ([]byte, error) {
	var buffer bytes.Buffer
	compressed := gzip.NewWriter(&buffer)
	archive := tar.NewWriter(compressed)
	for _, file := range []struct {
		name    string
		mode    int64
		content []byte
	}{{"LICENSE", 0o644, licence}, {b.program, 0o755, b.content}} {
		if err := archive.WriteHeader(&tar.Header{Name: file.name, Mode: file.mode, Size: int64(len(file.content)), Format: tar.FormatUSTAR}); err != nil {
			return nil, err
		}
		if _, err := archive.Write(file.content); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(archive.Close(), compressed.Close()); err != nil {
		return nil, err
	}
	return buffer.Bytes(), nil
}

func write(directory, name string, content []byte) error {
	return os.WriteFile(filepath.Join(directory, name), content, 0o644)
}

// writeChecksums writes the checksums of all other files of a directory, as sha256sum does.
func writeChecksums(directory string) error {
	entries, err := os.ReadDir(directory)
	if err != nil {
		return err
	}
	var lines strings.Builder
	for _, entry := range entries { // in alphabetical order
		if entry.Name() == checksums || !entry.Type().IsRegular() {
			continue
		}
		file, err := os.Open(filepath.Join(directory, entry.Name()))
		if err != nil {
			return err
		}
		hash := sha256.New()
		_, err = io.Copy(hash, file)
		if err := errors.Join(err, file.Close()); err != nil {
			return err
		}
		fmt.Fprintf(&lines, "%x  %s\n", hash.Sum(nil), entry.Name())
	}
	return write(directory, checksums, []byte(lines.String()))
}

// The following types are the parts of the manifest of a plugin that Krew reads (krew.googlecontainertools.github.com/v1alpha2).

type krewPlugin struct {
	APIVersion string       `json:"apiVersion"`
	Kind       string       `json:"kind"`
	Metadata   krewMetadata `json:"metadata"`
	Spec       krewSpec     `json:"spec"`
}

type krewMetadata struct {
	Name string `json:"name"`
}

type krewSpec struct {
	Version     string         `json:"version"`
	Homepage    string         `json:"homepage"`
	Short       string         `json:"shortDescription"`
	Description string         `json:"description"`
	Platforms   []krewPlatform `json:"platforms"`
}

type krewPlatform struct {
	Selector struct {
		Labels map[string]string `json:"matchLabels"`
	} `json:"selector"`
	URI    string     `json:"uri"`
	SHA256 string     `json:"sha256"`
	Bin    string     `json:"bin"`
	Files  []krewFile `json:"files"`
}

type krewFile struct {
	From string `json:"from"`
	To   string `json:"to"`
}

func krewPlatformOf(b *binary, version string, archive []byte) krewPlatform {
	p := krewPlatform{
		URI:    fmt.Sprintf("%s/releases/download/%s/%s.tar.gz", repository, version, b.name(version)),
		SHA256: fmt.Sprintf("%x", sha256.Sum256(archive)), Bin: b.program,
		Files: []krewFile{{b.program, "."}, {"LICENSE", "."}},
	}
	p.Selector.Labels = map[string]string{"os": b.system, "arch": b.architecture}
	return p
}

func krewManifest(version string, platforms []krewPlatform) ([]byte, error) {
	if !slices.ContainsFunc(platforms, func(p krewPlatform) bool { return p.Selector.Labels["os"] == "linux" }) {
		return nil, fmt.Errorf("there is no binary of %s for linux", plugin)
	}
	return yaml.Marshal(krewPlugin{
		APIVersion: "krew.googlecontainertools.github.com/v1alpha2", Kind: "Plugin", Metadata: krewMetadata{Name: "semmoe"},
		Spec: krewSpec{
			Version: version, Homepage: repository, Short: "Inspect and approve plans of MoE models",
			Description: "Shows the state of MoEDeployments of the Sem-MoE operator, approves plans,\nand pauses, resumes and rolls back deployments.\n",
			Platforms:   platforms,
		},
	})
}
