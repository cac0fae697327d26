// SPDX-License-Identifier: Apache-2.0

// Mkimage builds a container image with one static program, and writes the image as a tar that containerd, podman and
// docker can load. With binaries for several architectures, separated by commas, the tar has an image for each of them.
// In internal/tools:
//
//	go run ./image/cmd/mkimage --binary dist/semmoe --name semmoe:dev --out dist/semmoe.tar
//
// It prints the digest of the manifest of the image. The same program and name give the same bytes.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/semmoe/operator/internal/tools/image"
)

func main() {
	if err := run(os.Args[1:], os.Stdout, os.Stderr); err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(os.Stderr, "mkimage:", err)
		}
		os.Exit(1)
	}
}

func run(arguments []string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("mkimage", flag.ContinueOnError)
	flags.SetOutput(stderr)
	binary := flags.String("binary", "", "paths of the static program for each architecture, separated by commas; their base name is the entrypoint of the image")
	version := flags.String("version", "", "version in the labels of the image (default: no labels)")
	revision := flags.String("revision", "", "commit in the labels of the image, with --version")
	name := flags.String("name", "", "name of the image, [DOMAIN/]REPOSITORY:TAG")
	out := flags.String("out", "", "path of the tar file to write")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	for _, option := range []struct{ name, value string }{{"binary", *binary}, {"name", *name}, {"out", *out}} {
		if option.value == "" {
			return fmt.Errorf("--%s is missing; usage: mkimage --binary FILE --name NAME:TAG --out FILE", option.name)
		}
	}
	options := image.Options{Name: *name}
	for _, path := range strings.Split(*binary, ",") {
		content, err := os.ReadFile(path)
		if err != nil {
			return fmt.Errorf("--binary: %w", err)
		}
		if program := filepath.Base(path); options.Program == "" || options.Program == program {
			options.Program = program
		} else {
			return fmt.Errorf("--binary: %s and %s have different names", options.Program, program)
		}
		options.Binaries = append(options.Binaries, content)
	}
	if *version != "" {
		options.Labels = map[string]string{
			"org.opencontainers.image.licenses": "Apache-2.0",
			"org.opencontainers.image.revision": *revision,
			"org.opencontainers.image.source":   "https://github.com/semmoe/operator",
			"org.opencontainers.image.title":    options.Program,
			"org.opencontainers.image.version":  *version,
		}
	}
	var layout bytes.Buffer
	digest, err := image.Build(&layout, options)
	if err != nil {
		return err
	}
	// A reader of --out sees the old image or the new one, never a part.
	part := *out + ".part"
	if err := errors.Join(os.WriteFile(part, layout.Bytes(), 0o644), os.Rename(part, *out)); err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	_, err = fmt.Fprintln(stdout, digest)
	return err
}
