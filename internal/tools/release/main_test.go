// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

// ownBinaries copies the test's program as the plugin for this platform, and returns its directory and build information.
func ownBinaries(t *testing.T, platform string) (bin string, content []byte, info *buildinfo.BuildInfo) {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if content, err = os.ReadFile(path); err != nil {
		t.Fatal(err)
	}
	if info, err = buildinfo.Read(bytes.NewReader(content)); err != nil {
		t.Fatal(err)
	}
	bin = t.TempDir()
	if err := errors.Join(os.Mkdir(filepath.Join(bin, platform), 0o755), write(filepath.Join(bin, platform), plugin, content), write(bin, "LICENSE", []byte("license"))); err != nil {
		t.Fatal(err)
	}
	return bin, content, info
}

func TestRun(t *testing.T) {
	platform := runtime.GOOS + "_" + runtime.GOARCH
	bin, content, info := ownBinaries(t, platform)
	version := info.Main.Version
	out := t.TempDir()
	if err := write(out, "chart.tgz", []byte("chart")); err != nil {
		t.Fatal(err)
	}
	licence := filepath.Join(bin, "LICENSE")
	if err := run(bin, out, version, licence); err != nil {
		t.Fatal(err)
	}
	name := plugin + "_" + version + "_" + platform
	read := func(file string) []byte {
		t.Helper()
		data, err := os.ReadFile(filepath.Join(out, file))
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	archive := read(name + ".tar.gz")
	if diff := cmp.Diff(map[string]string{"LICENSE": "license", plugin: string(content)}, unpack(t, archive)); diff != "" {
		t.Errorf("archive (-want +got): %.500s", diff)
	}

	var bill spdxDocument
	if err := json.Unmarshal(read(name+".spdx.json"), &bill); err != nil {
		t.Fatal(err)
	}
	want := []string{filepath.Base(info.Path) + " " + version, "stdlib " + strings.TrimPrefix(info.GoVersion, "go")}
	for _, module := range info.Deps {
		want = append(want, module.Path+" "+module.Version)
	}
	var got []string
	for _, p := range bill.Packages {
		got = append(got, p.Name+" "+p.Version)
	}
	if diff := cmp.Diff(want, got); diff != "" || len(info.Deps) == 0 {
		t.Errorf("packages of the bill of materials (-want +got):\n%s", diff)
	}
	if len(bill.Relationships) != len(bill.Packages) {
		t.Errorf("%d relationships of %d packages", len(bill.Relationships), len(bill.Packages))
	}

	var manifest krewPlugin
	if err := yaml.UnmarshalStrict(read("semmoe.yaml"), &manifest); err != nil {
		t.Fatal(err)
	}
	if p := manifest.Spec.Platforms; len(p) != 1 || p[0].SHA256 != fmt.Sprintf("%x", sha256.Sum256(archive)) || !strings.HasSuffix(p[0].URI, "/"+version+"/"+name+".tar.gz") {
		t.Errorf("platforms of the Krew manifest: %+v", p)
	}

	var files []string
	for line := range strings.Lines(string(read(checksums))) {
		sum, file, _ := strings.Cut(strings.TrimSpace(line), "  ")
		if sum != fmt.Sprintf("%x", sha256.Sum256(read(file))) {
			t.Errorf("checksum of %s: %s", file, sum)
		}
		files = append(files, file)
	}
	if want := []string{"chart.tgz", name + ".spdx.json", name + ".tar.gz", "semmoe.yaml"}; !slices.Equal(files, want) {
		t.Errorf("checksums of %q, want %q", files, want)
	}

	before := read(checksums)
	if err := run(bin, out, version, licence); err != nil || !bytes.Equal(before, read(checksums)) {
		t.Errorf("a second run wrote different files, %v", err)
	}
}

func unpack(t *testing.T, data []byte) map[string]string {
	t.Helper()
	plain, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for reader := tar.NewReader(plain); ; {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(reader)
		if err != nil {
			t.Fatal(err)
		}
		files[header.Name] = string(content)
	}
}

func TestRunRejectsOtherBinaries(t *testing.T) {
	platform := runtime.GOOS + "_" + runtime.GOARCH
	for name, test := range map[string]struct{ platform, version, want string }{
		"version":  {platform, "v9.9.9", "is invalid: it must be v9.9.9, which a build of the clean checkout of this tag has"},
		"platform": {"plan9_arm", "", "the binary is for " + platform},
	} {
		t.Run(name, func(t *testing.T) {
			bin, _, info := ownBinaries(t, test.platform)
			if test.version == "" {
				test.version = info.Main.Version
			}
			if err := run(bin, t.TempDir(), test.version, filepath.Join(bin, "LICENSE")); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
		})
	}
	if err := run(t.TempDir(), t.TempDir(), "v1.0.0", "LICENSE"); err == nil {
		t.Error("no license, no binaries: want an error")
	}
}
