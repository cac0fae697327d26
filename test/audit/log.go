// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
)

// Policy is an audit.k8s.io/v1 Policy for Log.Read. It logs every request of service accounts, except those of
// kube-system.
const Policy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: None
  userGroups: ["system:serviceaccounts:kube-system"]
- level: Metadata
  userGroups: ["system:serviceaccounts"]
- level: None
`

// Request is a request to the API server, with only the attributes that RBAC evaluates.
type Request struct {
	User, Verb, Group string
	// Resource is a resource with its subresource, if any, as in "pods/status".
	Resource string
	// Namespace and Name are empty if the request has none.
	Namespace, Name string
}

func (r Request) String() string {
	return fmt.Sprintf("%s: %s %s %s/%s", r.User, r.Verb, resourceName(r.Resource, r.Group), r.Namespace, r.Name)
}

func resourceName(resource, group string) string {
	if group == "" {
		return resource
	}
	return resource + "." + group
}

// Log contains the requests in the audit logs of an API server.
type Log struct {
	// granted contains the authorized requests, regardless of the response.
	granted map[Request]bool
	// refused contains the requests that were not authorized, with the reason.
	refused map[Request]string
	// insecure contains the requests whose pods the audited pod security standard would refuse, with the reason.
	insecure map[Request]string
}

// NewLog returns an empty log.
func NewLog() *Log { return &Log{map[Request]bool{}, map[Request]string{}, map[Request]string{}} }

// ReadFiles adds the files of a log.
func (l *Log) ReadFiles(paths ...string) error {
	for _, path := range paths {
		file, err := os.Open(path)
		if err != nil {
			return err
		}
		err = l.Read(file)
		if err := errors.Join(err, file.Close()); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	return nil
}

// event contains the fields of an audit.k8s.io/v1 Event that are read.
type event struct {
	Verb string `json:"verb"`
	User struct {
		Username string `json:"username"`
	} `json:"user"`
	ImpersonatedUser *struct {
		Username string `json:"username"`
	} `json:"impersonatedUser"`
	ObjectRef *struct {
		Resource    string `json:"resource"`
		Subresource string `json:"subresource"`
		Group       string `json:"apiGroup"`
		Namespace   string `json:"namespace"`
		Name        string `json:"name"`
	} `json:"objectRef"`
	ResponseStatus struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	} `json:"responseStatus"`
	Annotations map[string]string `json:"annotations"`
}

const (
	// decisionAnnotation holds the decision of the authorizer on the request: allow or forbid.
	decisionAnnotation = "authorization.k8s.io/decision"
	// insecureAnnotation holds the reason why the standard that the namespace audits would refuse a pod or a pod template.
	insecureAnnotation = "pod-security.kubernetes.io/audit-violations"
)

// Read adds a log with one JSON object per line. It ignores requests without an object, such as a request for the
// version, and an incomplete last line, which is still being written.
func (l *Log) Read(r io.Reader) error {
	lines := bufio.NewReader(r)
	for number := 1; ; number++ {
		line, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("line %d: %w", number, err)
		}
		e := event{}
		if err := json.Unmarshal(line, &e); err != nil {
			return fmt.Errorf("line %d: %w", number, err)
		}
		l.add(e)
	}
}

func (l *Log) add(e event) {
	if e.ObjectRef == nil {
		return
	}
	r := Request{User: e.User.Username, Verb: e.Verb, Group: e.ObjectRef.Group, Resource: e.ObjectRef.Resource, Namespace: e.ObjectRef.Namespace, Name: e.ObjectRef.Name}
	if e.ImpersonatedUser != nil {
		r.User = e.ImpersonatedUser.Username
	}
	if e.ObjectRef.Subresource != "" {
		r.Resource += "/" + e.ObjectRef.Subresource
	}
	if why := e.Annotations[insecureAnnotation]; why != "" {
		l.insecure[r] = why
	}
	switch {
	case e.Annotations[decisionAnnotation] == "forbid":
		l.refused[r] = e.ResponseStatus.Message
		return
	case e.ResponseStatus.Code == http.StatusForbidden && lacksRight(e.ResponseStatus.Message):
		l.refused[r] = e.ResponseStatus.Message
	}
	l.granted[r] = true
	// A patch that applies a missing object creates it. The API server checks the right to create while it answers the
	// patch.
	if e.Verb == "patch" && e.ResponseStatus.Code == http.StatusCreated {
		r.Verb = "create"
		l.granted[r] = true
	}
}

// Refused returns the requests that were not authorized and that no grant permits, with the reason, sorted. A refused
// request that a grant permits was made while the binding of the grant did not exist.
func (l *Log) Refused(grants []Grant) ([]string, error) {
	lacking := maps.Clone(l.refused)
	for i := range grants {
		rights, err := grants[i].rights()
		if err != nil {
			return nil, err
		}
		for _, right := range rights {
			maps.DeleteFunc(lacking, func(r Request, why string) bool { return right.permits(r) && !lacksRight(why) })
		}
	}
	return formatted(lacking), nil
}

// InsecureContainers returns the names of the containers and init containers for which the audited standard would
// refuse a pod, each with a request and the complete reason. Violations by volumes are not attributed to a container.
// users is the name of a container that the user defines. If it violates the standard, the security context of its pod
// is the user's too, so that violations which the pod may cause for all its containers are not reported for the other
// containers.
func (l *Log) InsecureContainers(users string) map[string]string {
	found := map[string]string{}
	for _, text := range formatted(l.insecure) {
		for _, part := range containerNames.FindAllString(text, -1) {
			ofPod := strings.HasPrefix(part, "pod or ") && strings.Contains(part, `"`+users+`"`)
			for _, quoted := range quotedName.FindAllStringSubmatch(part, -1) {
				if !ofPod || quoted[1] == users {
					found[quoted[1]] = text
				}
			}
		}
	}
	return found
}

var (
	containerNames = regexp.MustCompile(`(pod or )?containers? "[^"]+"(, "[^"]+")*`)
	quotedName     = regexp.MustCompile(`"([^"]+)"`)
)

// Requests returns the number of different authorized requests.
func (l *Log) Requests() int { return len(l.granted) }

// formatted returns one text per request, with its reason, sorted.
func formatted(requests map[Request]string) []string {
	var all []string
	for r, why := range requests {
		all = append(all, r.String()+": "+why)
	}
	slices.Sort(all)
	return all
}
