// SPDX-License-Identifier: Apache-2.0

package artifact

import (
	"fmt"
	"regexp"
	"time"
)

// Audience is the required audience of service account tokens for the store.
const Audience = "artifacts.semmoe.io"

// Kind is the kind of object that a scope belongs to.
type Kind string

// The kinds of scopes.
const (
	// Profile scopes contain routing traces and counts, which include token IDs of prompts.
	Profile Kind = "profiles"
	// Plan scopes contain forecast tables.
	Plan Kind = "plans"
)

// Scope is the owner of artifacts: one profile or one plan of a namespace.
type Scope struct {
	Namespace string `json:"namespace"`
	Kind      Kind   `json:"kind"`
	// ID is the short digest of the inputs of a profile, or of the layout of a plan: 8 to 63 lower-case letters and
	// digits, so that it is a valid label value.
	ID string `json:"id"`
}

var (
	namespacePattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
	idPattern        = regexp.MustCompile(`^[a-z0-9]{8,63}$`)
)

// Validate returns an error if a scope is invalid.
func (s Scope) Validate() error {
	switch {
	case !namespacePattern.MatchString(s.Namespace):
		return fmt.Errorf("namespace %q: must be a DNS label of at most 63 characters", s.Namespace)
	case s.Kind != Profile && s.Kind != Plan:
		return fmt.Errorf("kind %q: must be %q or %q", s.Kind, Profile, Plan)
	case !idPattern.MatchString(s.ID):
		return fmt.Errorf("id %q: must be 8 to 63 lower-case letters and digits", s.ID)
	}
	return nil
}

// String returns the path of the scope in the protocol.
func (s Scope) String() string {
	return "namespaces/" + s.Namespace + "/" + string(s.Kind) + "/" + s.ID
}

// Artifact is one stored artifact.
type Artifact struct {
	Scope
	Digest Digest `json:"digest"`
	// Size is in bytes.
	Size int64 `json:"size"`
	// Modified is the time of the last upload, by the clock of the storage.
	Modified time.Time `json:"modified"`
}

// List is the response to a list request, in no particular order.
type List struct {
	Artifacts []Artifact `json:"artifacts"`
}

// Result is the result of a scope.
type Result struct {
	Digest Digest `json:"digest"`
}
