// SPDX-License-Identifier: Apache-2.0

package image

import (
	"fmt"
	"regexp"
	"strings"
)

var (
	domainPattern     = regexp.MustCompile(`^(localhost|[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+|[A-Za-z0-9.-]+:[0-9]+)$`)
	repositoryPattern = regexp.MustCompile(`^[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*$`)
	tagPattern        = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$`)
)

// parseReference returns the full form of an image name, and its tag. Container runtimes look up images by the full
// form: a pod with the image semmoe:dev would not find an image that is stored under the name "semmoe:dev".
func parseReference(name string) (full, tag string, err error) {
	invalid := func(what string) error {
		return fmt.Errorf("image name %q: %s; want [DOMAIN/]REPOSITORY:TAG, for example semmoe:dev", name, what)
	}
	colon := strings.LastIndexByte(name, ':')
	if colon <= strings.LastIndexByte(name, '/') {
		return "", "", invalid("it has no tag")
	}
	repository, tag := name[:colon], name[colon+1:]
	if !tagPattern.MatchString(tag) {
		return "", "", invalid(fmt.Sprintf("tag %q must be 1 to 128 letters, digits, '_', '.' or '-', and not begin with '.' or '-'", tag))
	}
	domain, path, found := strings.Cut(repository, "/")
	if !found || !domainPattern.MatchString(domain) {
		domain, path = "docker.io", repository // the default of all container engines
		if !found {
			path = "library/" + path
		}
	}
	if !repositoryPattern.MatchString(path) {
		return "", "", invalid(fmt.Sprintf("repository %q must be lower-case words of letters and digits, joined by '/', '.', '_' or '-'", path))
	}
	return domain + "/" + path + ":" + tag, tag, nil
}
