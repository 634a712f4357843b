"""Selenium's keys and actions; ``None`` without selenium, where the fixture ``browser`` skips the tests.

``importorskip`` at the top of a module only skips that module; importing its functions elsewhere would fail.
"""

try:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys
except ModuleNotFoundError:
    ActionChains = Keys = None

__all__ = ["ActionChains", "Keys"]
