// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

const header = "# Rendered from charts/semmoe-operator by make generate: change the template of the same name there.\n"

// forKustomize are the chart values for config/ that differ from the defaults. The CRDs are in a separate directory,
// the annotation to keep objects only has a meaning for Helm, and users can omit the directory of the monitoring
// objects.
var forKustomize = []string{"--set", "image.repository=semmoe,crds.enabled=false,crds.keep=false,store.persistence.keep=false,monitoring.enabled=true,dashboards.enabled=true"}

// renderConfig writes each rendered template to the file of the same name below config, and removes the files of
// deleted templates.
func renderConfig(helm, chart, config string) error {
	var stderr bytes.Buffer
	command := exec.Command(helm, append([]string{"template", "semmoe", chart, "--namespace", "semmoe-system"}, forKustomize...)...)
	command.Stderr = &stderr
	manifest, err := command.Output()
	if err != nil {
		return fmt.Errorf("helm template: %w: %s", err, stderr.Bytes())
	}
	rendered, err := byTemplate(string(manifest))
	if err != nil {
		return err
	}
	delete(rendered, filepath.Join("rbac", "role.yaml")) // the source of this template is in config
	if err := removeRendered(config); err != nil {
		return err
	}
	for name, text := range rendered {
		if err := os.WriteFile(filepath.Join(config, name), []byte(header+text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// helmLabels matches the labels with the name of the release, and of the chart and its version.
var helmLabels = regexp.MustCompile(`(?m)^ *(app\.kubernetes\.io/(instance|managed-by|version)|helm\.sh/chart): .*\n`)

// byTemplate splits the output of helm template into the documents of each template, by path below templates/, without
// the labels that only have a meaning for Helm.
func byTemplate(manifest string) (map[string]string, error) {
	const source = "# Source: semmoe-operator/templates/"
	rendered := map[string]string{}
	for _, document := range strings.Split("\n"+manifest, "\n---\n")[1:] {
		line, text, _ := strings.Cut(document, "\n")
		name, ok := strings.CutPrefix(line, source)
		if !ok {
			return nil, fmt.Errorf("helm template: a document begins with %q instead of %q", line, source)
		}
		if rendered[name] != "" {
			rendered[name] += "---\n"
		}
		rendered[name] += helmLabels.ReplaceAllString(strings.TrimSpace(text)+"\n", "")
	}
	return rendered, nil
}

// removeRendered removes the rendered files. Files without the header are written by hand and are kept.
func removeRendered(config string) error {
	files, err := filepath.Glob(filepath.Join(config, "*", "*.yaml"))
	if err != nil {
		return err
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if !bytes.HasPrefix(text, []byte(header)) {
			continue
		}
		if err := os.Remove(file); err != nil {
			return err
		}
	}
	return nil
}
