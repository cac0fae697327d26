package artifact

import (
	"fmt"
	"regexp"
	"time"
)

// Audience is the audience that a service-account token must have for the store.
const Audience = "artifacts.semmoe.io"

// Kind says what a scope belongs to.
type Kind string

// The kinds of scopes.
const (
	// Profile holds routing traces and counts. They contain token ids of prompts.
	Profile Kind = "profiles"
	// Plan holds forecast tables.
	Plan Kind = "plans"
)

// Scope is what an artifact belongs to: one profile or one plan of a namespace.
type Scope struct {
	Namespace string `json:"namespace"`
	Kind      Kind   `json:"kind"`
	// ID is the short digest of the inputs of a profile, or of a plan's layout: 8 to 63 lower-case letters and digits,
	// so that it fits a label.
	ID string `json:"id"`
}

var (
	namespacePattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
	idPattern        = regexp.MustCompile(`^[a-z0-9]{8,63}$`)
)

// Validate tells what is wrong with a scope.
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

// String is the scope's path in the protocol.
func (s Scope) String() string {
	return "namespaces/" + s.Namespace + "/" + string(s.Kind) + "/" + s.ID
}

// Artifact is one stored artifact.
type Artifact struct {
	Scope
	Digest Digest `json:"digest"`
	// Size is in bytes.
	Size int64 `json:"size"`
	// Modified is when it was last stored, by the clock of the storage.
	Modified time.Time `json:"modified"`
}

// List is the answer to a request for artifacts, in no particular order.
type List struct {
	Artifacts []Artifact `json:"artifacts"`
}

// Result is a scope's result.
type Result struct {
	Digest Digest `json:"digest"`
}
