// SPDX-License-Identifier: Apache-2.0

package image

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"path"
	"slices"
)

// User is the numeric user and group ID of the program. Kubernetes can verify runAsNonRoot only for a numeric ID.
const User = "65532:65532"

// Media types of the OCI image specification, version 1.1.
const (
	mediaTypeIndex    = "application/vnd.oci.image.index.v1+json"
	mediaTypeManifest = "application/vnd.oci.image.manifest.v1+json"
	mediaTypeConfig   = "application/vnd.oci.image.config.v1+json"
	mediaTypeLayer    = "application/vnd.oci.image.layer.v1.tar"
)

// Options describe an image.
type Options struct {
	// Name is the name of the image, [DOMAIN/]REPOSITORY:TAG.
	Name string
	// Program is the file name of the entrypoint. The program is stored as /<Program>.
	Program string
	// Binaries are the contents of the program, static ELF executables for Linux, one for each architecture.
	Binaries [][]byte
	// Labels are the labels of the image and the annotations of its manifests, such as its version.
	Labels map[string]string
}

// Build writes an image to w as the tar of an OCI layout. With several binaries, the image is an index of an image for
// each architecture. Build returns the digest of the manifest or the index ("sha256:<hex>"), which registries and nodes
// use as the identity of the image. An error reports an invalid option or comes from w.
func Build(w io.Writer, options Options) (string, error) {
	name, tag, err := parseReference(options.Name)
	if err != nil {
		return "", err
	}
	if err := validateProgram(options.Program); err != nil {
		return "", err
	}
	if len(options.Binaries) == 0 {
		return "", fmt.Errorf("program %s: no binary", options.Program)
	}
	var blobs []file
	var manifests []descriptor
	for _, binary := range options.Binaries {
		manifest, parts, err := build(&options, binary)
		if err != nil {
			return "", err
		}
		if slices.ContainsFunc(manifests, func(d descriptor) bool { return *d.Platform == *manifest.Platform }) {
			return "", fmt.Errorf("program %s: two binaries for %s", options.Program, manifest.Platform.Architecture)
		}
		manifests, blobs = append(manifests, manifest), append(blobs, parts...)
	}
	root := manifests[0]
	if len(manifests) > 1 {
		architectures, err := json.Marshal(index{SchemaVersion: 2, MediaType: mediaTypeIndex, Manifests: manifests, Annotations: options.Labels})
		if err != nil {
			return "", err
		}
		root, blobs = describe(mediaTypeIndex, architectures), append(blobs, blob(architectures))
	}
	root.Annotations = map[string]string{
		"io.containerd.image.name":          name, // containerd and docker
		"org.opencontainers.image.ref.name": tag,  // podman and the specification
	}
	top, err := json.Marshal(index{SchemaVersion: 2, MediaType: mediaTypeIndex, Manifests: []descriptor{root}})
	if err != nil {
		return "", err
	}
	layout, err := archive(append([]file{
		{path: "oci-layout", mode: 0o644, data: []byte(`{"imageLayoutVersion":"1.0.0"}`)},
		{path: "index.json", mode: 0o644, data: top},
	}, blobs...))
	if err != nil {
		return "", err
	}
	if _, err := w.Write(layout); err != nil {
		return "", err
	}
	return root.Digest, nil
}

// build returns the manifest and the blobs of the image for the architecture of a binary.
func build(options *Options, binary []byte) (descriptor, []file, error) {
	architecture, err := staticArchitecture(binary)
	if err != nil {
		return descriptor{}, nil, fmt.Errorf("program %s: %w", options.Program, err)
	}
	layer, err := archive([]file{
		{path: "etc/", mode: 0o755},
		{path: "etc/group", mode: 0o644, data: []byte("root:x:0:\nnonroot:x:65532:\n")},
		{path: "etc/passwd", mode: 0o644, data: []byte("root:x:0:0:root:/:/\nnonroot:x:65532:65532:nonroot:/:/\n")},
		{path: "etc/ssl/", mode: 0o755},
		{path: "etc/ssl/certs/", mode: 0o755},
		{path: authoritiesPath, mode: 0o644, data: authorities()},
		{path: options.Program, mode: 0o755, data: binary},
		{path: "tmp/", mode: 0o1777},
	})
	if err != nil {
		return descriptor{}, nil, err
	}
	platform := platform{Architecture: architecture, OS: "linux"}
	config, err := json.Marshal(config{
		platform: platform,
		Config: runtimeConfig{
			User: User, Env: []string{"PATH=/"}, Entrypoint: []string{"/" + options.Program}, WorkingDir: "/", Labels: options.Labels,
		},
		RootFS: rootFS{Type: "layers", DiffIDs: []string{digest(layer)}},
	})
	if err != nil {
		return descriptor{}, nil, err
	}
	manifest, err := json.Marshal(manifest{
		SchemaVersion: 2,
		MediaType:     mediaTypeManifest,
		Config:        describe(mediaTypeConfig, config),
		Layers:        []descriptor{describe(mediaTypeLayer, layer)},
		Annotations:   options.Labels,
	})
	if err != nil {
		return descriptor{}, nil, err
	}
	root := describe(mediaTypeManifest, manifest)
	root.Platform = &platform
	return root, []file{blob(config), blob(manifest), blob(layer)}, nil
}

// validateProgram rejects program names that would replace another file of the image.
func validateProgram(name string) error {
	if name != path.Base(name) || slices.Contains([]string{"", ".", "..", "/", "etc", "tmp"}, name) {
		return fmt.Errorf("program name %q: must be a file name without directory, and neither etc nor tmp", name)
	}
	return nil
}

// staticArchitecture returns the architecture (GOARCH) of a static Linux executable.
func staticArchitecture(binary []byte) (string, error) {
	program, err := elf.NewFile(bytes.NewReader(binary))
	if err != nil {
		return "", fmt.Errorf("not an ELF executable: %w", err)
	}
	for _, segment := range program.Progs {
		if segment.Type == elf.PT_INTERP {
			return "", fmt.Errorf("dynamically linked, so it cannot start in an empty image: build it with CGO_ENABLED=0")
		}
	}
	switch program.Machine {
	case elf.EM_X86_64:
		return "amd64", nil
	case elf.EM_AARCH64:
		return "arm64", nil
	default:
		return "", fmt.Errorf("built for machine %v: want amd64 or arm64", program.Machine)
	}
}

// file is an entry of a tar. A path that ends with a slash is a directory.
type file struct {
	path string
	mode int64
	data []byte
}

// archive returns a tar of the files. The owner is root, and the modification time is 0.
func archive(files []file) ([]byte, error) {
	var buffer bytes.Buffer
	writer := tar.NewWriter(&buffer)
	for _, f := range files {
		header := &tar.Header{Name: f.path, Mode: f.mode, Size: int64(len(f.data)), Format: tar.FormatUSTAR}
		if err := writer.WriteHeader(header); err != nil {
			return nil, fmt.Errorf("tar entry %s: %w", f.path, err)
		}
		if _, err := writer.Write(f.data); err != nil {
			return nil, fmt.Errorf("tar entry %s: %w", f.path, err)
		}
	}
	if err := writer.Close(); err != nil {
		return nil, err
	}
	return buffer.Bytes(), nil
}

func digest(data []byte) string {
	sum := sha256.Sum256(data)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func describe(mediaType string, data []byte) descriptor {
	return descriptor{MediaType: mediaType, Digest: digest(data), Size: int64(len(data))}
}

func blob(data []byte) file {
	return file{path: "blobs/sha256/" + digest(data)[len("sha256:"):], mode: 0o644, data: data}
}

// The following types are the parts of the OCI image specification that this package writes.

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

type config struct {
	platform
	Config runtimeConfig `json:"config"`
	RootFS rootFS        `json:"rootfs"`
}

type runtimeConfig struct {
	User       string   `json:"User"`
	Env        []string `json:"Env"`
	Entrypoint []string `json:"Entrypoint"`
	WorkingDir string   `json:"WorkingDir"`

	Labels map[string]string `json:"Labels,omitempty"`
}

type rootFS struct {
	Type    string   `json:"type"`
	DiffIDs []string `json:"diff_ids"`
}

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int64             `json:"size"`
	Platform    *platform         `json:"platform,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type manifest struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Config        descriptor   `json:"config"`
	Layers        []descriptor `json:"layers"`

	Annotations map[string]string `json:"annotations,omitempty"`
}

type index struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Manifests     []descriptor `json:"manifests"`

	Annotations map[string]string `json:"annotations,omitempty"`
}
