// SPDX-License-Identifier: Apache-2.0

package image

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// program returns a minimal ELF executable with one segment of the given type.
func program(t *testing.T, machine elf.Machine, segment elf.ProgType) []byte {
	t.Helper()
	header := elf.Header64{
		Type: uint16(elf.ET_EXEC), Machine: uint16(machine), Version: uint32(elf.EV_CURRENT),
		Phoff: 64, Ehsize: 64, Phentsize: 56, Phnum: 1, Shentsize: 64,
	}
	copy(header.Ident[:], elf.ELFMAG)
	header.Ident[elf.EI_CLASS] = byte(elf.ELFCLASS64)
	header.Ident[elf.EI_DATA] = byte(elf.ELFDATA2LSB)
	header.Ident[elf.EI_VERSION] = byte(elf.EV_CURRENT)
	var buffer bytes.Buffer
	for _, part := range []any{header, elf.Prog64{Type: uint32(segment)}} {
		if err := binary.Write(&buffer, binary.LittleEndian, part); err != nil {
			t.Fatal(err)
		}
	}
	return buffer.Bytes()
}

// untar returns the content and the mode of each entry, in order.
func untar(t *testing.T, data []byte) (names []string, contents map[string][]byte, modes map[string]int64) {
	t.Helper()
	contents, modes = map[string][]byte{}, map[string]int64{}
	for reader := tar.NewReader(bytes.NewReader(data)); ; {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return names, contents, modes
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(reader)
		if err != nil {
			t.Fatal(err)
		}
		if seconds := header.ModTime.Unix(); seconds != 0 || header.Uid != 0 || header.Gid != 0 {
			t.Errorf("%s: date %d, owner %d:%d, want 0, 0:0", header.Name, seconds, header.Uid, header.Gid)
		}
		names = append(names, header.Name)
		contents[header.Name], modes[header.Name] = content, header.Mode
	}
}

func unmarshal[T any](t *testing.T, data []byte) T {
	t.Helper()
	var value T
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&value); err != nil {
		t.Fatalf("%s: %v", data, err)
	}
	return value
}

func TestBuildWritesAValidLayout(t *testing.T) {
	for architecture, machine := range map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64} {
		t.Run(architecture, func(t *testing.T) {
			content := program(t, machine, elf.PT_LOAD)
			var layout bytes.Buffer
			got, err := Build(&layout, Options{Name: "semmoe:dev", Program: "semmoe", Binaries: [][]byte{content}})
			if err != nil {
				t.Fatal(err)
			}
			_, files, _ := untar(t, layout.Bytes())
			if diff := cmp.Diff(`{"imageLayoutVersion":"1.0.0"}`, string(files["oci-layout"])); diff != "" {
				t.Errorf("oci-layout (-want +got):\n%s", diff)
			}
			// follow returns the blob of a descriptor, and verifies its digest and size.
			follow := func(d descriptor) []byte {
				t.Helper()
				data, found := files["blobs/sha256/"+strings.TrimPrefix(d.Digest, "sha256:")]
				if !found || digest(data) != d.Digest || int64(len(data)) != d.Size {
					t.Fatalf("blob %s of %d bytes: found %v, has %s and %d bytes", d.Digest, d.Size, found, digest(data), len(data))
				}
				return data
			}
			index := unmarshal[index](t, files["index.json"])
			if len(index.Manifests) != 1 {
				t.Fatalf("%d manifests, want 1", len(index.Manifests))
			}
			root := index.Manifests[0]
			if root.Digest != got {
				t.Errorf("Build returned %s, the index names %s", got, root.Digest)
			}
			if diff := cmp.Diff(&platform{Architecture: architecture, OS: "linux"}, root.Platform); diff != "" {
				t.Errorf("platform (-want +got):\n%s", diff)
			}
			wantNames := map[string]string{
				"io.containerd.image.name": "docker.io/library/semmoe:dev", "org.opencontainers.image.ref.name": "dev",
			}
			if diff := cmp.Diff(wantNames, root.Annotations); diff != "" {
				t.Errorf("annotations (-want +got):\n%s", diff)
			}
			manifest := unmarshal[manifest](t, follow(root))
			if len(manifest.Layers) != 1 {
				t.Fatalf("%d layers, want 1", len(manifest.Layers))
			}
			wantConfig := config{
				platform: platform{Architecture: architecture, OS: "linux"},
				Config: runtimeConfig{
					User: "65532:65532", Env: []string{"PATH=/"}, Entrypoint: []string{"/semmoe"}, WorkingDir: "/",
				},
				RootFS: rootFS{Type: "layers", DiffIDs: []string{manifest.Layers[0].Digest}},
			}
			if diff := cmp.Diff(wantConfig, unmarshal[config](t, follow(manifest.Config)), cmp.AllowUnexported(config{})); diff != "" {
				t.Errorf("config (-want +got):\n%s", diff)
			}
			names, contents, modes := untar(t, follow(manifest.Layers[0]))
			if diff := cmp.Diff([]string{"etc/", "etc/group", "etc/passwd", "etc/ssl/", "etc/ssl/certs/", "etc/ssl/certs/ca-certificates.crt", "semmoe", "tmp/"}, names); diff != "" {
				t.Errorf("layer (-want +got):\n%s", diff)
			}
			wantModes := map[string]int64{
				"etc/": 0o755, "etc/group": 0o644, "etc/passwd": 0o644, "semmoe": 0o755, "tmp/": 0o1777,
				"etc/ssl/": 0o755, "etc/ssl/certs/": 0o755, "etc/ssl/certs/ca-certificates.crt": 0o644,
			}
			if diff := cmp.Diff(wantModes, modes); diff != "" {
				t.Errorf("modes (-want +got):\n%s", diff)
			}
			if !bytes.Equal(contents["semmoe"], content) {
				t.Error("the program in the layer differs from the given program")
			}
			if !bytes.Equal(contents["etc/ssl/certs/ca-certificates.crt"], authorities()) {
				t.Error("the layer has different certificate authorities")
			}
			if !strings.Contains(string(contents["etc/passwd"]), "nonroot:x:65532:65532:") {
				t.Errorf("etc/passwd lacks the user: %s", contents["etc/passwd"])
			}
		})
	}
}

func TestBuildIsReproducible(t *testing.T) {
	options := Options{Name: "semmoe:dev", Program: "semmoe", Binaries: [][]byte{program(t, elf.EM_X86_64, elf.PT_LOAD)}}
	var first, second bytes.Buffer
	firstDigest, err := Build(&first, options)
	if err != nil {
		t.Fatal(err)
	}
	secondDigest, err := Build(&second, options)
	if err != nil {
		t.Fatal(err)
	}
	if firstDigest != secondDigest || !bytes.Equal(first.Bytes(), second.Bytes()) {
		t.Errorf("two builds differ: %s and %s", firstDigest, secondDigest)
	}
	options.Binaries[0][len(options.Binaries[0])-1]++
	changedDigest, err := Build(io.Discard, options)
	if err != nil {
		t.Fatal(err)
	}
	if changedDigest == firstDigest {
		t.Error("a different program has the same digest")
	}
}

func TestBuildRejectsInvalidOptions(t *testing.T) {
	of := func(name, program string, binary []byte) Options {
		return Options{Name: name, Program: program, Binaries: [][]byte{binary}}
	}
	static := program(t, elf.EM_X86_64, elf.PT_LOAD)
	tests := map[string]struct {
		options Options
		want    string
	}{
		"no tag":          {of("semmoe", "semmoe", static), `image name "semmoe": it has no tag`},
		"port, no tag":    {of("localhost:5000/semmoe", "semmoe", static), "it has no tag"},
		"empty tag":       {of("semmoe:", "semmoe", static), `tag "" must be`},
		"upper case":      {of("SemMoE:dev", "semmoe", static), `repository "library/SemMoE" must be`},
		"no program":      {of("semmoe:dev", "", static), `program name "": must be a file name`},
		"directory":       {of("semmoe:dev", "bin/semmoe", static), `program name "bin/semmoe"`},
		"parent":          {of("semmoe:dev", "..", static), `program name ".."`},
		"another file":    {of("semmoe:dev", "etc", static), "neither etc nor tmp"},
		"not ELF":         {of("semmoe:dev", "semmoe", []byte("#!/bin/sh\n")), "program semmoe: not an ELF executable"},
		"empty":           {of("semmoe:dev", "semmoe", nil), "not an ELF executable"},
		"dynamic":         {of("semmoe:dev", "semmoe", program(t, elf.EM_X86_64, elf.PT_INTERP)), "CGO_ENABLED=0"},
		"another machine": {of("semmoe:dev", "semmoe", program(t, elf.EM_S390, elf.PT_LOAD)), "EM_S390: want amd64 or arm64"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			var written bytes.Buffer
			_, err := Build(&written, test.options)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want one with %q", err, test.want)
			}
			if written.Len() > 0 {
				t.Errorf("%d bytes written before the options were checked", written.Len())
			}
		})
	}
}

func TestParseReference(t *testing.T) {
	tests := map[string]string{
		"semmoe:dev":                   "docker.io/library/semmoe:dev",
		"semmoe/operator:v1.2.3":       "docker.io/semmoe/operator:v1.2.3",
		"example.com/semmoe:dev":       "example.com/semmoe:dev",
		"localhost/semmoe:dev":         "localhost/semmoe:dev",
		"localhost:5000/a/b-c_d.e:dev": "localhost:5000/a/b-c_d.e:dev",
	}
	for name, want := range tests {
		t.Run(name, func(t *testing.T) {
			got, tag, err := parseReference(name)
			if err != nil {
				t.Fatal(err)
			}
			if got != want || !strings.HasSuffix(name, ":"+tag) {
				t.Errorf("full name %s with tag %s, want %s", got, tag, want)
			}
			if again, _, err := parseReference(got); err != nil || again != got {
				t.Errorf("the full form of the full name is %s (%v)", again, err)
			}
		})
	}
}

func FuzzParseReference(f *testing.F) {
	for _, seed := range []string{"semmoe:dev", "localhost:5000/a/b:c", "a/b", ":", "/:a", "a..b:c", ""} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, name string) {
		full, _, err := parseReference(name)
		if err != nil {
			return
		}
		if again, _, err := parseReference(full); err != nil || again != full {
			t.Errorf("%q becomes %q, and that %q (%v)", name, full, again, err)
		}
	})
}

// TestBuildForSeveralArchitectures verifies the index of an image for two architectures, and that each of them has its
// own program.
func TestBuildForSeveralArchitectures(t *testing.T) {
	programs := map[string][]byte{"amd64": program(t, elf.EM_X86_64, elf.PT_LOAD), "arm64": program(t, elf.EM_AARCH64, elf.PT_LOAD)}
	labels := map[string]string{"org.opencontainers.image.version": "v1.2.3"}
	options := Options{Name: "registry.example/semmoe:v1.2.3", Program: "semmoe", Binaries: [][]byte{programs["amd64"], programs["arm64"]}, Labels: labels}
	var layout bytes.Buffer
	got, err := Build(&layout, options)
	if err != nil {
		t.Fatal(err)
	}
	_, files, _ := untar(t, layout.Bytes())
	follow := func(d descriptor) []byte { return files["blobs/sha256/"+strings.TrimPrefix(d.Digest, "sha256:")] }
	root := unmarshal[index](t, files["index.json"]).Manifests
	if len(root) != 1 || root[0].Digest != got || root[0].MediaType != mediaTypeIndex || root[0].Annotations["org.opencontainers.image.ref.name"] != "v1.2.3" {
		t.Fatalf("%+v, want one index %s", root, got)
	}
	architectures := unmarshal[index](t, follow(root[0]))
	if len(architectures.Manifests) != 2 || !cmp.Equal(architectures.Annotations, labels) {
		t.Fatalf("%+v, want an image for each of two architectures", architectures)
	}
	for _, d := range architectures.Manifests {
		m := unmarshal[manifest](t, follow(d))
		c := unmarshal[config](t, follow(m.Config))
		if c.platform != *d.Platform || !cmp.Equal(c.Config.Labels, labels) {
			t.Errorf("config %+v of the platform %+v", c, d.Platform)
		}
		if _, contents, _ := untar(t, follow(m.Layers[0])); !bytes.Equal(contents["semmoe"], programs[c.Architecture]) {
			t.Errorf("%s: another program", c.Architecture)
		}
	}
	options.Binaries[1] = options.Binaries[0]
	if _, err := Build(io.Discard, options); err == nil || !strings.Contains(err.Error(), "two binaries for amd64") {
		t.Errorf("the same architecture twice: error %v", err)
	}
	options.Binaries = nil
	if _, err := Build(io.Discard, options); err == nil {
		t.Error("no binary: want an error")
	}
}
