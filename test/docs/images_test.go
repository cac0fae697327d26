// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestImagesHaveVersions checks that engine images in documents, samples and help texts have a version, because the webhook warns
// of images without one.
func TestImagesHaveVersions(t *testing.T) {
	all := documents(t)
	for _, folder := range []string{filepath.Join("config", "samples"), "cmd"} { // help texts have examples too
		err := filepath.WalkDir(filepath.Join(repository, folder), func(file string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || strings.HasSuffix(file, "_test.go") {
				return err
			}
			text, err := os.ReadFile(file)
			all[file] = string(text)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	images, found := regexp.MustCompile(`\b(?:lmsysorg/sglang|vllm/vllm-openai|quay\.io/ascend/vllm-ascend|nvcr\.io/[\w./-]+)(:[\w.-]+|@sha256:\w+)?`), 0
	for file, text := range all {
		for _, image := range images.FindAllStringSubmatch(text, -1) {
			found++
			if image[1] == "" || strings.HasPrefix(image[1], ":latest") {
				t.Errorf("%s: image %s has no version", file, image[0])
			}
		}
	}
	if found < 10 {
		t.Errorf("found only %d images", found)
	}
}
